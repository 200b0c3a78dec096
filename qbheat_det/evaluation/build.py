# Copyright (c) qbheat_det contributors. Apache-2.0.
"""From a dataset's name to the evaluator that its metadata, or the task of a run, asks for."""

import os

from detectron2.config import CfgNode
from detectron2.data import MetadataCatalog
from detectron2.evaluation import DatasetEvaluator

from qbheat_det.core.errors import UserError

from .classification import ClassificationEvaluator
from .coco import CocoEvaluator
from .reconstruction import ReconstructionEvaluator


def build_evaluator(
    cfg: CfgNode, dataset_name: str, output_dir: str | None = None, *, classifies: bool = False
) -> DatasetEvaluator:
    """Returns the evaluator of a registered dataset.

    Args:
        cfg: ``TEST.COCO_EVAL_LIBRARY``, ``OUTPUT_DIR`` and ``MODEL.CLASS_NAMES`` are read.
        dataset_name: a name registered with Detectron2, with ``evaluator_type`` in its metadata.
        output_dir: folder for the predictions; ``OUTPUT_DIR/inference/<dataset_name>`` if None.
        classifies: whether the images of class folders are to be classified; else their labels
            are not looked at.

    Raises:
        UserError: no evaluator here fits the dataset, or the COCO library asked for is unknown
            or not installed.
    """
    kind = MetadataCatalog.get(dataset_name).get("evaluator_type")
    if output_dir is None:
        output_dir = os.path.join(cfg.OUTPUT_DIR, "inference", dataset_name)
    if kind == "reconstruction" and classifies:
        names = cfg.MODEL.CLASS_NAMES
        return ClassificationEvaluator(dataset_name, class_names=names, output_dir=output_dir)
    if kind == "reconstruction":
        return ReconstructionEvaluator(dataset_name)
    if kind != "coco":
        said = f"has evaluator_type '{kind}'" if kind else "names no evaluator_type"
        raise UserError(
            f"dataset '{dataset_name}' {said}, but must be 'coco' or 'reconstruction': register it "
            "in COCO format"
        )
    return CocoEvaluator(dataset_name, output_dir=output_dir, library=cfg.TEST.COCO_EVAL_LIBRARY)
