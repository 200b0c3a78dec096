# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Evaluators: COCO metrics, classification, nearest neighbors, held-out loss."""

import os

from detectron2.config import CfgNode
from detectron2.data import MetadataCatalog
from detectron2.evaluation import DatasetEvaluator

from qbheat_det.core.errors import UserError
from qbheat_det.data import MAPPERS_OF_CLASSES, TiledEvaluator

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
    "build_evaluator",
    "choose_max_detections",
    "complete_annotations",
    "count_most_objects",
    "find_confusions",
    "measure_ranks",
    "rank_true_class",
    "rank_true_classes",
]


def build_evaluator(cfg: CfgNode, dataset_name: str) -> DatasetEvaluator:
    """Builds the evaluator of a registered dataset. Raises a ``UserError`` if there is none."""
    kind = MetadataCatalog.get(dataset_name).get("evaluator_type")
    output_dir = os.path.join(cfg.OUTPUT_DIR, "inference", dataset_name)
    if kind == "reconstruction" and cfg.INPUT.DATASET_MAPPER_NAME in MAPPERS_OF_CLASSES:
        names = cfg.MODEL.CLASS_NAMES
        return ClassificationEvaluator(dataset_name, class_names=names, output_dir=output_dir)
    if kind == "reconstruction":
        return HeldOutLossEvaluator(dataset_name)
    if kind != "coco":
        raise UserError(
            f"dataset '{dataset_name}' has evaluator_type '{kind}', but must be 'coco' or "
            "'reconstruction': register it in COCO format"
        )
    evaluator = CocoEvaluator(dataset_name, output_dir=output_dir)
    if cfg.INPUT.TILE:
        return TiledEvaluator(evaluator, cfg.INPUT.TILE)
    return evaluator
