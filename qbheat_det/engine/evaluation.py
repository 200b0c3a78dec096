# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Evaluates models on the test sets of a config."""

import logging
import math
import statistics
from collections.abc import Callable, Mapping
from typing import Any

from detectron2.config import CfgNode
from detectron2.evaluation import DatasetEvaluator, inference_on_dataset, print_csv_format
from detectron2.utils import comm
from torch import nn
from tqdm import tqdm

from qbheat_det.data import DataError, ImageBatches, join_messages
from qbheat_det.data.checks import refuse_broken_half
from qbheat_det.tasks import find_task

from .logs import is_interactive

logger = logging.getLogger(__name__)


class Evaluation:
    """Evaluates models on ``DATASETS.TEST``; reads annotations once."""

    def __init__(self, cfg: CfgNode, build_loader: Callable[[CfgNode, str], ImageBatches]) -> None:
        """``build_loader`` returns a loader of this process's share of a data set."""
        self._cfg = cfg
        self._build_loader = build_loader
        self._parts: dict[str, tuple[ImageBatches, DatasetEvaluator]] = {}
        self._warned: set[tuple[str, str]] = set()  # data sets, and images that are named

    def __call__(self, model: nn.Module) -> dict[str, Any]:
        """Evaluates a model, and returns results by task, such as ``{"bbox": {"AP": …}}``.

        With several test sets, maps the name of each set to such a dict. On all processes except
        the main one, the dict is empty. Unreadable images and their ground truth are left out.

        Raises:
            UserError: more than half of the images of a set cannot be read.
        """
        results = {name: self._evaluate(name, model) for name in self._cfg.DATASETS.TEST}
        if not comm.is_main_process():
            return {}
        if len(results) == 1:
            return next(iter(results.values()))
        return results

    def forget(self) -> None:
        """Makes the next evaluation rebuild its loaders and evaluators."""
        self._parts.clear()

    def _evaluate(self, name: str, model: nn.Module) -> dict[str, Any]:
        if name not in self._parts:
            loader = self._build_loader(self._cfg, name)
            evaluator = find_task(self._cfg).build_evaluator(self._cfg, name)
            self._parts[name] = loader, evaluator
        loader, evaluator = self._parts[name]
        images = tqdm(
            loader,
            desc=f"evaluating on {name}",
            unit="batch",
            leave=False,
            delay=1,
            disable=not is_interactive(),
        )
        results = dict(inference_on_dataset(model, images, evaluator) or {})
        skipped: dict[str, DataError] = {}
        for met in comm.all_gather(loader.skipped):
            skipped |= met
        refuse_broken_half(skipped, loader.num_files, f"the evaluation on '{name}'")
        if comm.is_main_process():
            new = [where for where in sorted(skipped) if (name, where) not in self._warned]
            if new:
                self._warned |= {(name, where) for where in new}
                words = f"The evaluation on '{name}' skips {len(skipped):,} images"
                logger.warning(f"{words}: {join_messages(skipped[where] for where in new)}")
            for metrics in results.values():
                metrics |= average_kept_classes(self._cfg.MODEL, metrics)
            print_csv_format(results)
            for task, metrics in results.items():
                logger.info(f"{task} on {name}: {_format_metrics(metrics)}")
        return results


def average_kept_classes(node: CfgNode, metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns the AP of the old classes ("AP_old") and of the new ones ("AP_new").

    Empty for a detector that was not trained with ``--keep-classes``. Classes whose AP is nan,
    because they have no objects, do not count. A group without other classes is left out.

    Args:
        node: ``MODEL`` of a config.
        metrics: metrics by name, with those of classes, such as "AP-cat".
    """
    num_kept = node.KEEP_CLASSES.NUM
    averages = {}
    if num_kept:
        groups = {"AP_old": node.CLASS_NAMES[:num_kept], "AP_new": node.CLASS_NAMES[num_kept:]}
        for title, names in groups.items():
            values = [metrics.get(f"AP-{name}", math.nan) for name in names]
            known = [value for value in values if math.isfinite(value)]
            if known:
                averages[title] = statistics.fmean(known)
    return averages


def _format_metrics(metrics: Mapping[str, float]) -> str:
    """Returns one line of metrics for the terminal. Only log.txt lists those of single classes."""
    texts = []
    for name, value in metrics.items():
        if "-" not in name:
            number = f"{value:.4g}" if math.isfinite(value) else "\N{EN DASH}"
            texts.append(f"{name} {number}")
    return ", ".join(texts)
