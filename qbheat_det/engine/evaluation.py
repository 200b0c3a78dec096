# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Evaluates models on the test sets of a config."""

import logging
import math
from collections.abc import Callable
from typing import Any

from detectron2.config import CfgNode
from detectron2.data import MetadataCatalog
from detectron2.evaluation import DatasetEvaluator, inference_on_dataset, print_csv_format
from detectron2.utils import comm
from torch import nn
from tqdm import tqdm

from qbheat_det.data import (
    MAPPERS_OF_CLASSES,
    DataError,
    ImageBatches,
    build_class_batches,
    build_image_batches,
    build_mapper,
    join_messages,
    load_test_set,
)
from qbheat_det.data.checks import refuse_broken_half
from qbheat_det.evaluation import build_evaluator

from .logs import is_interactive

logger = logging.getLogger(__name__)


def build_test_loader(cfg: CfgNode, dataset_name: str) -> ImageBatches:
    """Returns a test loader whose mapper is ``INPUT.DATASET_MAPPER_NAME``.

    Detectors get one image or tile per batch, as in Detectron2's loader. Classifiers and
    pre-training objectives get batches of equally sized images.
    """
    if cfg.INPUT.DATASET_MAPPER_NAME in MAPPERS_OF_CLASSES:
        return build_class_batches(cfg, dataset_name)
    if MetadataCatalog.get(dataset_name).get("evaluator_type") == "reconstruction":
        return build_image_batches(cfg, dataset_name)
    return ImageBatches(
        load_test_set(cfg, dataset_name),
        mapper=build_mapper(cfg, is_train=False),
        batch_size=1,
        num_workers=cfg.DATALOADER.NUM_WORKERS,
    )


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
        return next(iter(results.values())) if len(results) == 1 else results

    def forget(self) -> None:
        """Makes the next evaluation rebuild its loaders and evaluators."""
        self._parts.clear()

    def _evaluate(self, name: str, model: nn.Module) -> dict[str, Any]:
        if name not in self._parts:
            loader = self._build_loader(self._cfg, name)
            self._parts[name] = loader, build_evaluator(self._cfg, name)
        loader, evaluator = self._parts[name]
        title, hidden = f"evaluating on {name}", not is_interactive()
        images = tqdm(loader, desc=title, unit="batch", leave=False, delay=1, disable=hidden)
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
            print_csv_format(results)
            for task, metrics in results.items():
                # The terminal shows no per-class results; log.txt lists them.
                shown = [f"{key} {v:.4g}" if math.isfinite(v) else f"{key} \N{EN DASH}"
                         for key, v in metrics.items() if "-" not in key]  # fmt: skip
                logger.info(f"{task} on {name}: {', '.join(shown)}")
        return results
