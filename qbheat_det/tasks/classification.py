# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Image classifiers, which learn from class folders."""

import os
from collections.abc import Sequence
from typing import Any, ClassVar

from detectron2.config import CfgNode
from detectron2.evaluation import DatasetEvaluator

from qbheat_det.data import CLASSES, Source, list_classes, load_classes
from qbheat_det.data.image_batches import BATCH_SIZE
from qbheat_det.evaluation import ClassificationEvaluator

from .base import Records, Task, list_common_class_values


class Classification(Task):
    """Classification of whole images, evaluated by accuracy."""

    name = "classification"
    learns_from = "class folders"
    uses_class_folders = True
    recipe = "custom/tran1_285M_probe.yaml"
    mappers: ClassVar[set[str]] = {"classify"}
    set_names = ("custom_labelled_train", "custom_labelled_val")
    data_flags = "name class folders with --data and --val"
    size_keys = ("INPUT.PRETRAIN.SIZE",)
    batch_size = BATCH_SIZE

    def fits(self, source: Source) -> bool:
        return source.format == CLASSES

    def load_training_set(self, cfg: CfgNode) -> Sequence[dict[str, Any]]:
        names = cfg.DATASETS.TRAIN
        return load_classes(names, cfg.MODEL.CLASS_NAMES or list_classes(names))

    def load_test_set(self, cfg: CfgNode, dataset_name: str) -> Records:
        """Returns the records of a test set, whose labels index ``MODEL.CLASS_NAMES``."""
        return load_classes([dataset_name], cfg.MODEL.CLASS_NAMES)

    def build_evaluator(self, cfg: CfgNode, dataset_name: str) -> DatasetEvaluator:
        return ClassificationEvaluator(
            dataset_name,
            class_names=cfg.MODEL.CLASS_NAMES,
            output_dir=os.path.join(cfg.OUTPUT_DIR, "inference", dataset_name),
        )

    def get_image_size(self, cfg: CfgNode) -> int:
        """Returns the side of the square images."""
        return cfg.INPUT.PRETRAIN.SIZE

    def get_size_values(
        self, cfg: CfgNode, image_size: int, *, eval_only: bool = False
    ) -> dict[str, Any]:
        return {"INPUT.PRETRAIN.SIZE": image_size}

    def get_class_values(self, names: Sequence[str], ids: Sequence[int]) -> dict[str, Any]:
        return {
            **list_common_class_values(names, ids),
            "MODEL.CLASSIFIER.NUM_CLASSES": len(names),
        }
