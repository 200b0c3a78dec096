# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Evaluation: COCO's metrics, the loss of pre-training on held-out images, nearest neighbours."""

from .build import build_evaluator
from .coco import CocoEvaluator, resolve_coco_library
from .knn import KnnScore, extract_features, score_neighbours

__all__ = [
    "CocoEvaluator",
    "KnnScore",
    "build_evaluator",
    "extract_features",
    "resolve_coco_library",
    "score_neighbours",
]
