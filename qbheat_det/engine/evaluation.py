# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Evaluates models on the test sets of a config."""

import logging
import math
from collections.abc import Callable
from typing import Any

from detectron2.config import CfgNode
from detectron2.data import MetadataCatalog, build_detection_test_loader
from detectron2.evaluation import DatasetEvaluator, inference_on_dataset, print_csv_format
from detectron2.utils import comm
from torch import nn
from torch.utils.data import DataLoader
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
from qbheat_det.evaluation import build_evaluator

from .logs import is_interactive

logger = logging.getLogger(__name__)
TestLoader = DataLoader[Any] | ImageBatches


def build_test_loader(cfg: CfgNode, dataset_name: str) -> TestLoader:
    """Returns a test loader whose mapper is ``INPUT.DATASET_MAPPER_NAME``.

    Detectors get Detectron2's loader with one image or tile per batch. Classifiers and pre-training
    objectives get batches of equally sized images.
    """
    if cfg.INPUT.DATASET_MAPPER_NAME in MAPPERS_OF_CLASSES:
        return build_class_batches(cfg, dataset_name)
    if MetadataCatalog.get(dataset_name).get("evaluator_type") == "reconstruction":
        return build_image_batches(cfg, dataset_name)
    loader: TestLoader = build_detection_test_loader(
        load_test_set(cfg, dataset_name),
        mapper=build_mapper(cfg, is_train=False),
        num_workers=cfg.DATALOADER.NUM_WORKERS,
    )
    return loader


class Evaluation:
    """Evaluates models on ``DATASETS.TEST``; reads annotations once."""

    def __init__(self, cfg: CfgNode, build_loader: Callable[[CfgNode, str], TestLoader]) -> None:
        """``build_loader`` returns a loader of this process's share of a data set."""
        self._cfg = cfg
        self._build_loader = build_loader
        self._parts: dict[str, tuple[TestLoader, DatasetEvaluator]] = {}
        self._warned: set[str] = set()

    def __call__(self, model: nn.Module) -> dict[str, Any]:
        """Evaluates a model, and returns results by task, such as ``{"bbox": {"AP": …}}``.

        With several test sets, maps the name of each set to such a dict. On all processes except
        the main one, the dict is empty.
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
        for met in comm.all_gather(loader.skipped) if isinstance(loader, ImageBatches) else ():
            skipped |= met
        if comm.is_main_process():
            if skipped and name not in self._warned:
                self._warned.add(name)
                listed = [skipped[where] for where in sorted(skipped)]
                words = f"The evaluation on '{name}' skips {len(listed):,} images"
                logger.warning(f"{words}: {join_messages(listed)}")
            print_csv_format(results)
            for task, metrics in results.items():
                # The terminal shows no per-class results; log.txt lists them.
                shown = [f"{key} {v:.4g}" if math.isfinite(v) else f"{key} \N{EN DASH}"
                         for key, v in metrics.items() if "-" not in key]  # fmt: skip
                logger.info(f"{task} on {name}: {', '.join(shown)}")
        return results
