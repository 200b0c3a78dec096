# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Evaluators: COCO metrics, classification, nearest neighbors, held-out loss."""

import itertools
import math
import os
import statistics
from collections.abc import Sequence
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.data import MetadataCatalog
from detectron2.evaluation import DatasetEvaluator
from detectron2.utils import comm

from qbheat_det.core.errors import UserError

from .classification import (
    ClassificationEvaluator,
    extract_features,
    find_confusions,
    measure_ranks,
    rank_true_class,
    score_neighbours,
)
from .coco import CocoEvaluator, complete_annotations, resolve_coco_library

__all__ = [
    "ClassificationEvaluator", "CocoEvaluator", "HeldOutLossEvaluator", "build_evaluator",
    "complete_annotations", "extract_features", "find_confusions", "measure_ranks",
    "rank_true_class", "resolve_coco_library", "score_neighbours",
]  # fmt: skip


def build_evaluator(
    cfg: CfgNode, dataset_name: str, *, classifies: bool = False
) -> DatasetEvaluator:
    """Returns the evaluator of a registered dataset, or raises a ``UserError`` if none fits.

    ``classifies`` selects classification for images of class folders, instead of the loss.
    """
    kind = MetadataCatalog.get(dataset_name).get("evaluator_type")
    output_dir = os.path.join(cfg.OUTPUT_DIR, "inference", dataset_name)
    if kind == "reconstruction" and classifies:
        names = cfg.MODEL.CLASS_NAMES
        return ClassificationEvaluator(dataset_name, class_names=names, output_dir=output_dir)
    if kind == "reconstruction":
        return HeldOutLossEvaluator(dataset_name)
    if kind != "coco":
        said = f"has evaluator_type '{kind}'" if kind else "names no evaluator_type"
        raise UserError(
            f"dataset '{dataset_name}' {said}, but must be 'coco' or 'reconstruction': register it "
            "in COCO format"
        )
    return CocoEvaluator(dataset_name, output_dir=output_dir, library=cfg.TEST.COCO_EVAL_LIBRARY)


class HeldOutLossEvaluator(DatasetEvaluator):
    """Averages the per-image loss of a pre-training model over a dataset.

    For "loss_reconstruction", results are ``{"reconstruction": {"loss_corner", "loss_centre",
    "loss", "loss_standard_error"}}``: the means over corner and over center views, if there are
    any; the mean over images of the mean over their views; and its standard error. For
    "loss_feature", the key is "feature".
    """

    def __init__(self, dataset_name: str) -> None:
        self._dataset_name = dataset_name
        self._name = "reconstruction"
        self._losses: list[tuple[str, str, float]] = []  # image, view, loss

    def reset(self) -> None:
        """Removes all images."""
        self._losses = []

    def process(self, inputs: list[dict[str, Any]], outputs: list[dict[str, Any]]) -> None:
        """Adds a batch; raises a ``UserError`` if the model returns no loss."""
        names = {name for output in outputs for name in output if name.startswith("loss_")}
        if len(names) != 1 or any(names - output.keys() for output in outputs):
            raise UserError(
                f"dataset '{self._dataset_name}' has no annotations, which the model needs: only "
                "pre-training is evaluated on images alone"
            )
        (name,) = names
        self._name = name.removeprefix("loss_")
        losses = torch.stack([output[name] for output in outputs]).double().tolist()
        for entry, output, loss in zip(inputs, outputs, losses, strict=True):
            view = output.get("place", "")
            view = "corner" if view not in ("", "centre") else view
            image = str(entry.get("image_id", entry.get("file_name")))
            self._losses.append((image, view, loss))

    def evaluate(self) -> dict[str, dict[str, float]]:
        """Gathers all processes; returns empty results except on the main process."""
        parts = comm.gather(self._losses, dst=0)
        if not comm.is_main_process():
            return {}
        # Sorted, so that sums equal the sums of one process to the last bit.
        losses = sorted(itertools.chain.from_iterable(parts))
        views = ("corner", "centre")
        by_view = {view: [loss for _, seen, loss in losses if seen == view] for view in views}
        each = [
            statistics.fmean(loss for _, _, loss in seen)
            for _, seen in itertools.groupby(losses, key=lambda entry: entry[0])
        ]
        mean, error = mean_and_standard_error(each)
        found = {f"loss_{view}": statistics.fmean(seen) for view, seen in by_view.items() if seen}
        return {self._name: {**found, "loss": mean, "loss_standard_error": error}}


def mean_and_standard_error(values: Sequence[float]) -> tuple[float, float]:
    """Returns the mean of independent values and its standard error; nan if undefined."""
    if not values or not all(map(math.isfinite, values)):
        return math.nan, math.nan
    mean = statistics.fmean(values)
    if len(values) == 1:
        return mean, math.nan
    return mean, statistics.stdev(values, xbar=mean) / math.sqrt(len(values))
