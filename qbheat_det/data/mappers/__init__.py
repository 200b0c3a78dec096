# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Dataset mappers, from a record of a data set to what a model takes, by the name in the config."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from detectron2.config import CfgNode
from detectron2.data import DatasetMapper
from detectron2.data import transforms as T
from detectron2.data.detection_utils import SizeMismatchError
from PIL.Image import DecompressionBombError

from qbheat_det.core.errors import UserError
from qbheat_det.core.text import one_line
from qbheat_det.data.checks import DataError, check_input_keys

from .classification import ClassificationMapper
from .fixed_views import VIEW_ROW, FixedViews, Mapper, PreparedMapper, number_records
from .pretraining import PretrainingMapper, TwoViewMapper

__all__ = [
    "VIEW_ROW", "ClassificationMapper", "DetrDatasetMapper", "FixedViews", "Mapper",
    "PreparedMapper", "PretrainingMapper", "TwoViewMapper", "build_detr_crop", "number_records",
]  # fmt: skip


class DetrDatasetMapper(DatasetMapper):
    """Detectron2's mapper with DETR's random crop before its resize and flip.

    "End-to-End Object Detection with Transformers", arXiv:2005.12872, Sec. A.4. Differs only in the
    order: the flip comes last, as in Detectron2, which changes no probability.

    In training, with probability 1/2 the shorter side is resized to one of
    ``INPUT.DETR_CROP_RESIZE`` and a part of random height and width is cut out. Boxes are clipped
    to the crop; an image that loses all of them stays. Masks (``MODEL.MASK_ON``) are cropped along;
    polygons need ``shapely``.
    """

    @classmethod
    def from_config(cls, cfg: CfgNode, is_train: bool = True) -> dict[str, Any]:
        arguments: dict[str, Any] = super().from_config(cfg, is_train)
        if is_train and len(cfg.INPUT.DETR_CROP_RESIZE):
            crop = build_detr_crop(
                resize_to=cfg.INPUT.DETR_CROP_RESIZE, crop_range=cfg.INPUT.DETR_CROP_RANGE
            )
            arguments["augmentations"].insert(0, crop)
        return arguments


def build_detr_crop(*, resize_to: Sequence[int], crop_range: Sequence[int]) -> T.Augmentation:
    """Returns the augmentation that, half of the time, resizes and cuts out a part.

    The shorter side gets one of the lengths ``resize_to``, in pixels; ``crop_range`` is [min, max]
    of height and width of the part. A ``UserError`` if they are not valid.
    """
    is_range = len(crop_range) == 2 and 0 < crop_range[0] <= crop_range[1]
    check_input_keys(
        ("DETR_CROP_RESIZE", resize_to, min(resize_to, default=0) > 0, "positive"),
        ("DETR_CROP_RANGE", crop_range, is_range, "[min, max] with 0 < min <= max"),
    )
    resize = T.ResizeShortestEdge(list(resize_to), sample_style="choice")
    crop = T.RandomCrop("absolute_range", tuple(crop_range))
    return T.RandomApply(T.AugmentationList([resize, crop]), prob=0.5)


DATASET_MAPPERS: dict[str, Callable[[CfgNode, bool], Mapper]] = {
    "default": DatasetMapper,
    "detr": DetrDatasetMapper,
    "pretrain": PretrainingMapper,
    "classify": ClassificationMapper,
    "two_views": TwoViewMapper,
}
"""What ``INPUT.DATASET_MAPPER_NAME`` can name: ``(cfg, is_train) -> mapper``.

To add one, before the data loader is built: ``DATASET_MAPPERS["mine"] = MyMapper``. A
subclass of Detectron2's ``DatasetMapper`` fits as it is; see ``PreparedMapper`` for one that needs
all records.
"""

MAPPERS_OF_IMAGES = {"pretrain", "classify", "two_views"}
"""Names of the mappers that need no annotations; one of your own goes here too if it needs none."""

MAPPERS_OF_CLASSES = {"classify"}
"""Those among them for images that have the class of their folder as "label"."""


def build_mapper(cfg: CfgNode, is_train: bool) -> "NamingMapper":
    """Returns the mapper that ``INPUT.DATASET_MAPPER_NAME`` names, or raises a ``UserError``.

    It raises one on an image that cannot be read, or is not of the annotated size.
    """
    name = cfg.INPUT.DATASET_MAPPER_NAME
    if name not in DATASET_MAPPERS:
        raise UserError(
            f"INPUT.DATASET_MAPPER_NAME is '{name}', but the mappers are "
            f"{', '.join(sorted(DATASET_MAPPERS))}"
        )
    return NamingMapper(DATASET_MAPPERS[name](cfg, is_train))


@dataclass(frozen=True)
class NamingMapper:
    """Calls a mapper, and names the image that it fails on."""

    mapper: Mapper

    def prepare(self, dataset_dicts: Sequence[dict[str, Any]]) -> None:
        """Gives all records to a ``PreparedMapper``."""
        if isinstance(self.mapper, PreparedMapper):
            self.mapper.prepare(dataset_dicts)

    def __call__(self, dataset_dict: dict[str, Any]) -> dict[str, Any] | DataError | None:
        try:
            return self.mapper(dataset_dict)
        except (OSError, SyntaxError, SizeMismatchError, DecompressionBombError) as error:
            raise UserError(
                f"image '{dataset_dict['file_name']}' cannot be used: {one_line(error)}"
            ) from error
