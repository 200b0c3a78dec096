# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Pre-training of encoders on images without labels."""

from collections.abc import Sequence
from typing import Any, ClassVar

from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, get_detection_dataset_dicts
from detectron2.evaluation import DatasetEvaluator

from qbheat_det.data import Source, number_records
from qbheat_det.data.image_batches import BATCH_SIZE, with_views
from qbheat_det.evaluation import HeldOutLossEvaluator
from qbheat_det.modeling.contracts import get_views

from .base import Records, Task


class Pretraining(Task):
    """Pre-training, evaluated by the loss on images that were held out."""

    name = "pretraining"
    learns_from = "images"
    recipe = "custom/distill_285M_cpu.yaml"
    mappers: ClassVar[set[str]] = {"pretrain", "two_views"}
    set_names = ("custom_images", "custom_val_images")
    data_flags = "name folders of images with --images and --val-images"
    size_keys = ("INPUT.PRETRAIN.SIZE",)
    batch_size = BATCH_SIZE

    def fits(self, source: Source) -> bool:
        return True  # images are enough, because labels are not read

    def load_training_set(self, cfg: CfgNode) -> Sequence[dict[str, Any]]:
        return get_detection_dataset_dicts(
            cfg.DATASETS.TRAIN, filter_empty=cfg.DATALOADER.FILTER_EMPTY_ANNOTATIONS
        )

    def load_test_set(self, cfg: CfgNode, dataset_name: str) -> Records:
        """Returns the records of a test set, each repeated for each view that is evaluated.

        A view is, for example, a position of the visible quarter of an image.
        """
        records = number_records(DatasetCatalog.get(dataset_name))
        return with_views(records, get_views(cfg).values())

    def build_evaluator(self, cfg: CfgNode, dataset_name: str) -> DatasetEvaluator:
        return HeldOutLossEvaluator(dataset_name)

    def get_image_size(self, cfg: CfgNode) -> int:
        """Returns the side of the square images."""
        return cfg.INPUT.PRETRAIN.SIZE

    def get_size_values(
        self, cfg: CfgNode, image_size: int, *, eval_only: bool = False
    ) -> dict[str, Any]:
        return {"INPUT.PRETRAIN.SIZE": image_size}
