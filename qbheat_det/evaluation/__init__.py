# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Evaluation: COCO metrics, classification, reconstruction loss, nearest neighbours."""

from .build import build_evaluator
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
    "ClassificationEvaluator", "CocoEvaluator", "build_evaluator", "complete_annotations",
    "extract_features", "find_confusions", "measure_ranks", "rank_true_class",
    "resolve_coco_library", "score_neighbours",
]  # fmt: skip
