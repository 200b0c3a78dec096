# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Evaluation on the test sets of a config, with loaders and evaluators that are built once."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from detectron2.config import CfgNode
from detectron2.data import MetadataCatalog, build_detection_test_loader
from detectron2.evaluation import DatasetEvaluator, inference_on_dataset, print_csv_format
from detectron2.utils import comm
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from qbheat_det.core.files import write_atomically
from qbheat_det.data import (
    MAPPERS_OF_CLASSES,
    Fault,
    ImageBatches,
    build_class_batches,
    build_image_batches,
    build_mapper,
)
from qbheat_det.evaluation import ClassificationEvaluator

from .broken_images import name_faults

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
        """
        Args:
            cfg: names the test sets.
            build_loader: from config and dataset to this process's part of the images.
            build_evaluator: from config and dataset to its evaluator.
        """
        self._cfg = cfg
        self._build_loader = build_loader
        self._build_evaluator = build_evaluator
        self._parts: dict[str, tuple[TestLoader, DatasetEvaluator]] = {}
        self._named: set[str] = set()  # sets whose broken images were told

    def __call__(self, model: nn.Module) -> dict[str, Any]:
        """Returns results by task, as ``{"bbox": {"AP": …}}``; by dataset where there are several.

        Empty on processes other than the main one.
        """
        results = {name: self._evaluate(name, model) for name in self._cfg.DATASETS.TEST}
        if not comm.is_main_process():
            return {}
        return next(iter(results.values())) if len(results) == 1 else results

    def close(self) -> None:
        """Ends the workers, which else wait until the garbage collector comes by."""
        self._parts.clear()

    def _evaluate(self, name: str, model: nn.Module) -> dict[str, Any]:
        if name not in self._parts:
            built = persistent(self._build_loader(self._cfg, name))
            self._parts[name] = built, self._build_evaluator(self._cfg, name)
        loader, evaluator = self._parts[name]
        results = dict(inference_on_dataset(model, loader, evaluator) or {})
        if isinstance(loader, ImageBatches):
            self._name_broken(name, loader.faults)
        if comm.is_main_process():
            print_csv_format(results)
            if isinstance(evaluator, ClassificationEvaluator):
                draw_confusion(name, evaluator)
        return results

    def _name_broken(self, name: str, faults: dict[str, Fault]) -> None:
        """Counts and names, once, the images that all processes left out."""
        everywhere: dict[str, Fault] = {}
        for found in comm.all_gather(faults):
            everywhere.update(found)
        if everywhere and name not in self._named:
            self._named.add(name)
            if comm.is_main_process():
                logger.warning(
                    f"Left out of the evaluation on '{name}', {len(everywhere):,} in all: "
                    f"{name_faults([everywhere[where] for where in sorted(everywhere)])}"
                )


def draw_confusion(dataset_name: str, evaluator: ClassificationEvaluator) -> None:
    """Writes ``confusion.png`` beside the evaluator's figures; a picture ends no run."""
    if not evaluator.output_dir:
        return
    path = Path(evaluator.output_dir) / "confusion.png"
    try:
        right = int(evaluator.confusion.trace()) / max(1, int(evaluator.confusion.sum()))
        title = f"{dataset_name}: top-1 {100 * right:.1f} %"
        from qbheat_det.analysis.confusion_matrix import plot_confusion  # imports this package
        from qbheat_det.analysis.plotting import chart_image

        chart = plot_confusion(evaluator.confusion, evaluator.class_names, title=title)
        image = chart_image(chart, format="png")
        write_atomically(path, lambda stream: stream.write(image.content))
    except Exception:
        logger.exception(f"'{path}' could not be drawn")


def persistent(loader: TestLoader) -> TestLoader:
    """Returns the same loader with workers that wait for the next pass instead of ending."""
    if isinstance(loader, ImageBatches):
        return loader
    if loader.num_workers == 0 or isinstance(loader.dataset, IterableDataset):
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
    """Returns Detectron2's loader with the mapper that ``INPUT.DATASET_MAPPER_NAME`` names.

    Sets of images alone come in batches, see ``qbheat_det.data.build_image_batches``, and those of
    a classifier with labels, see ``build_class_batches`` there.
    """
    if cfg.INPUT.DATASET_MAPPER_NAME in MAPPERS_OF_CLASSES:
        return build_class_batches(cfg, dataset_name)
    if MetadataCatalog.get(dataset_name).get("evaluator_type") == "reconstruction":
        return build_image_batches(cfg, dataset_name)
    mapper = build_mapper(cfg, is_train=False)
    loader: TestLoader = build_detection_test_loader(cfg, dataset_name, mapper=mapper)
    return loader
