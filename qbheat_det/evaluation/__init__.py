# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Evaluation: COCO's metrics, by the faster of two equal libraries."""

from .build import build_evaluator
from .coco import CocoEvaluator, resolve_coco_library

__all__ = ["CocoEvaluator", "build_evaluator", "resolve_coco_library"]
