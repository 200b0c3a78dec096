# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Detectors, which learn from images with boxes, and masks or keypoints in Detectron2's models."""

import os
from collections.abc import Sequence
from typing import Any, ClassVar

from detectron2.config import CfgNode
from detectron2.data import MetadataCatalog, get_detection_dataset_dicts
from detectron2.evaluation import DatasetEvaluator

from qbheat_det.core.errors import UserError
from qbheat_det.data import Source, TiledEvaluator, cut_records
from qbheat_det.evaluation import CocoEvaluator

from .base import Records, Task, list_common_class_values

_NUM_CLASSES = (
    "MODEL.MF_DETR.NUM_CLASSES",
    "MODEL.RETINANET.NUM_CLASSES",
    "MODEL.FCOS.NUM_CLASSES",
    "MODEL.ROI_HEADS.NUM_CLASSES",
)


class Detection(Task):
    """Detection with boxes, evaluated by COCO's metrics."""

    name = "detection"
    learns_from = "boxes"
    uses_boxes = True
    recipe = "custom/retinanet_lite0_finetune.yaml"
    sizes: ClassVar[dict[str, str]] = {
        "s": "custom/retinanet_lite0_gpu.yaml",  # first, as it needs no download
        "m": "custom/retinanet_r50_coco_gpu.yaml",
        "l": "custom/retinanet_convnext_gpu.yaml",
    }
    mappers: ClassVar[set[str]] = {"default", "detr"}
    set_names = ("custom_train", "custom_val")
    data_flags = "name annotations with --data and --val"
    size_keys = (
        "INPUT.MIN_SIZE_TRAIN",
        "INPUT.MAX_SIZE_TRAIN",
        "INPUT.MIN_SIZE_TEST",
        "INPUT.MAX_SIZE_TEST",
        "INPUT.DETR_CROP_RESIZE",
        "INPUT.DETR_CROP_RANGE",
    )
    batch_size = 1  # as in Detectron2

    def fits(self, source: Source) -> bool:
        return source.has_boxes

    def load_training_set(self, cfg: CfgNode) -> Sequence[dict[str, Any]]:
        min_keypoints = 0
        if cfg.MODEL.KEYPOINT_ON:
            min_keypoints = cfg.MODEL.ROI_KEYPOINT_HEAD.MIN_KEYPOINTS_PER_IMAGE
        proposal_files = None
        if cfg.MODEL.LOAD_PROPOSALS:
            proposal_files = cfg.DATASETS.PROPOSAL_FILES_TRAIN
        records = get_detection_dataset_dicts(
            cfg.DATASETS.TRAIN,
            filter_empty=cfg.DATALOADER.FILTER_EMPTY_ANNOTATIONS,
            min_keypoints=min_keypoints,
            proposal_files=proposal_files,
        )
        return cut_records(records, cfg.INPUT.TILE, is_train=True)

    def load_test_set(self, cfg: CfgNode, dataset_name: str) -> Records:
        """Returns the records of a test set. With ``INPUT.TILE``, tiles of the images are added."""
        proposal_files = None
        if cfg.MODEL.LOAD_PROPOSALS:
            index = list(cfg.DATASETS.TEST).index(dataset_name)
            proposal_files = [cfg.DATASETS.PROPOSAL_FILES_TEST[index]]
        records = get_detection_dataset_dicts(
            dataset_name, filter_empty=False, proposal_files=proposal_files
        )
        return cut_records(records, cfg.INPUT.TILE, is_train=False)

    def build_evaluator(self, cfg: CfgNode, dataset_name: str) -> DatasetEvaluator:
        kind = MetadataCatalog.get(dataset_name).get("evaluator_type")
        if kind != "coco":
            raise UserError(
                f"dataset '{dataset_name}' has evaluator_type '{kind}', but a detector needs "
                "'coco': register the set in COCO format"
            )
        output_dir = os.path.join(cfg.OUTPUT_DIR, "inference", dataset_name)
        evaluator = CocoEvaluator(dataset_name, output_dir=output_dir)
        if cfg.INPUT.TILE:
            return TiledEvaluator(evaluator, cfg.INPUT.TILE)
        return evaluator

    def get_image_size(self, cfg: CfgNode) -> int:
        """Returns the largest length in pixels that the shorter side of training images has."""
        return max(cfg.INPUT.MIN_SIZE_TRAIN)

    def get_size_values(
        self, cfg: CfgNode, image_size: int, *, eval_only: bool = False
    ) -> dict[str, Any]:
        """Scales all sizes of images and crops by one factor.

        The factor makes the largest of ``INPUT.MIN_SIZE_TRAIN`` equal to ``image_size``. With
        ``eval_only``, it makes ``INPUT.MIN_SIZE_TEST`` equal to ``image_size``.
        """
        node = cfg.INPUT
        present_size = max(node.MIN_SIZE_TRAIN)
        if eval_only:
            present_size = node.MIN_SIZE_TEST
        factor = image_size / max(1, present_size)
        return {
            "INPUT.MIN_SIZE_TRAIN": tuple(round(factor * side) for side in node.MIN_SIZE_TRAIN),
            "INPUT.MAX_SIZE_TRAIN": round(factor * node.MAX_SIZE_TRAIN),
            "INPUT.MIN_SIZE_TEST": round(factor * node.MIN_SIZE_TEST),
            "INPUT.MAX_SIZE_TEST": round(factor * node.MAX_SIZE_TEST),
            "INPUT.DETR_CROP_RESIZE": [round(factor * side) for side in node.DETR_CROP_RESIZE],
            "INPUT.DETR_CROP_RANGE": [round(factor * side) for side in node.DETR_CROP_RANGE],
        }

    def get_class_values(self, names: Sequence[str], ids: Sequence[int]) -> dict[str, Any]:
        return {
            **list_common_class_values(names, ids),
            **dict.fromkeys(_NUM_CLASSES, len(names)),
        }
