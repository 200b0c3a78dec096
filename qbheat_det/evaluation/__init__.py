# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Evaluators: COCO metrics, classification, nearest neighbors, held-out loss."""

from .classification import (
    ClassificationEvaluator,
    find_confusions,
    measure_ranks,
    rank_true_class,
    rank_true_classes,
)
from .coco import (
    MAX_DETECTIONS,
    STANDARD_DETECTIONS,
    CocoEvaluator,
    choose_max_detections,
    complete_annotations,
    count_most_objects,
    ignore_unannotated,
)
from .coco_matching import FastMatching
from .held_out_loss import HeldOutLossEvaluator

__all__ = [
    "MAX_DETECTIONS",
    "STANDARD_DETECTIONS",
    "ClassificationEvaluator",
    "CocoEvaluator",
    "FastMatching",
    "HeldOutLossEvaluator",
    "choose_max_detections",
    "complete_annotations",
    "count_most_objects",
    "find_confusions",
    "ignore_unannotated",
    "measure_ranks",
    "rank_true_class",
    "rank_true_classes",
]
