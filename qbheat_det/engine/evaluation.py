# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Evaluation on the test sets of a config, with loaders and evaluators that are built once."""

import logging
from collections.abc import Callable
from typing import Any

from detectron2.config import CfgNode
from detectron2.data import MetadataCatalog, build_detection_test_loader
from detectron2.evaluation import DatasetEvaluator, inference_on_dataset, print_csv_format
from detectron2.utils import comm
from torch import nn
from torch.utils.data import DataLoader

from qbheat_det.data import (
    MAPPERS_OF_CLASSES,
    DataError,
    ImageBatches,
    build_class_batches,
    build_image_batches,
    build_mapper,
    join_messages,
)

logger = logging.getLogger(__name__)
TestLoader = DataLoader[Any] | ImageBatches


class Evaluation:
    """Evaluates models on ``DATASETS.TEST``; annotations are read and workers started once."""

    def __init__(
        self,
        cfg: CfgNode,
        *,
        build_loader: Callable[[CfgNode, str], TestLoader],
        build_evaluator: Callable[[CfgNode, str], DatasetEvaluator],
    ) -> None:
        """Both functions get the config and a data set; the loader gives this process's part."""
        self._cfg = cfg
        self._build_loader = build_loader
        self._build_evaluator = build_evaluator
        self._parts: dict[str, tuple[TestLoader, DatasetEvaluator]] = {}
        self._warned: set[str] = set()  # sets whose skipped images were named

    def __call__(self, model: nn.Module) -> dict[str, Any]:
        """Returns results by task, such as ``{"bbox": {"AP": …}}``; by data set if several.

        Empty on processes other than the main one.
        """
        results = {name: self._evaluate(name, model) for name in self._cfg.DATASETS.TEST}
        if not comm.is_main_process():
            return {}
        return next(iter(results.values())) if len(results) == 1 else results

    def close(self) -> None:
        """Ends the workers, which would otherwise live until they are garbage-collected."""
        self._parts.clear()

    def _evaluate(self, name: str, model: nn.Module) -> dict[str, Any]:
        if name not in self._parts:
            loader = _with_persistent_workers(self._build_loader(self._cfg, name))
            self._parts[name] = loader, self._build_evaluator(self._cfg, name)
        loader, evaluator = self._parts[name]
        results = dict(inference_on_dataset(model, loader, evaluator) or {})
        if isinstance(loader, ImageBatches):
            self._warn_of_skipped_images(name, loader.skipped)
        if comm.is_main_process():
            print_csv_format(results)
        return results

    def _warn_of_skipped_images(self, name: str, skipped: dict[str, DataError]) -> None:
        """Names the images that all processes left out, once for each data set."""
        everywhere = {k: error for part in comm.all_gather(skipped) for k, error in part.items()}
        if everywhere and name not in self._warned and comm.is_main_process():
            self._warned.add(name)
            logger.warning(
                f"{len(everywhere):,} images are left out of the evaluation on '{name}': "
                f"{join_messages([everywhere[where] for where in sorted(everywhere)])}"
            )


def _with_persistent_workers(loader: TestLoader) -> TestLoader:
    """Returns the same loader with workers that wait for the next pass instead of ending."""
    if isinstance(loader, ImageBatches) or loader.num_workers == 0:
        return loader
    return DataLoader(
        loader.dataset,
        batch_size=loader.batch_size,
        sampler=loader.sampler,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        persistent_workers=True,
    )


def build_test_loader(cfg: CfgNode, dataset_name: str) -> TestLoader:
    """Returns the images of a data set as ``INPUT.DATASET_MAPPER_NAME`` maps them.

    Detectors get Detectron2's loader, which gives one image at a time; classifiers and pre-training
    objectives get batches of images of one size.
    """
    if cfg.INPUT.DATASET_MAPPER_NAME in MAPPERS_OF_CLASSES:
        return build_class_batches(cfg, dataset_name)
    if MetadataCatalog.get(dataset_name).get("evaluator_type") == "reconstruction":
        return build_image_batches(cfg, dataset_name)
    mapper = build_mapper(cfg, is_train=False)
    loader: TestLoader = build_detection_test_loader(cfg, dataset_name, mapper=mapper)
    return loader
