# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Dataset mappers, which turn a record of a data set into an input of a model.

``INPUT.DATASET_MAPPER_NAME`` names one of ``DATASET_MAPPERS``. ``FixedViews`` draws a fixed number
of augmented views of every image. A frozen encoder returns the same features for a view at every
visit, so they can be cached, see ``qbheat_det.feature_cache``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from detectron2.config import CfgNode
from detectron2.data import DatasetMapper
from detectron2.data import transforms as T
from detectron2.data.detection_utils import SizeMismatchError
from PIL.Image import DecompressionBombError

from qbheat_det.core.errors import UserError
from qbheat_det.core.seeding import VIEW, preserved_randomness, seed_place
from qbheat_det.core.text import one_line
from qbheat_det.data.checks import DataError, check_input_keys

from .classification import ClassificationMapper
from .pretraining import PretrainingMapper, TwoViewMapper

__all__ = ["ClassificationMapper", "PretrainingMapper", "TwoViewMapper"]

Mapper = Callable[[dict[str, Any]], dict[str, Any] | DataError | None]
"""Maps a record to an entry of a batch. None skips the image; an error also reports why."""

VIEW_ROW = "view_row"
"""Key of a record's index in the data set, which seeds its views."""


@runtime_checkable
class PreparedMapper(Protocol):
    """A mapper that receives all records once, before workers start."""

    def prepare(self, dataset_dicts: Sequence[dict[str, Any]]) -> None:
        """Prepares for these records, for example decodes a small set into memory."""

    def __call__(self, dataset_dict: dict[str, Any], /) -> dict[str, Any] | DataError | None:
        """Like any ``Mapper``."""


class DetrDatasetMapper(DatasetMapper):
    """Detectron2's mapper with DETR's random crop before its resize and flip.

    "End-to-End Object Detection with Transformers", arXiv:2005.12872, Sec. A.4. The flip comes
    last, as in Detectron2, which changes no probability.

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
"""Values of ``INPUT.DATASET_MAPPER_NAME``, as ``(cfg, is_train) -> mapper``.

To add one before the data loader is built, set ``DATASET_MAPPERS["mine"] = MyMapper``. A subclass
of Detectron2's ``DatasetMapper`` needs no change. ``PreparedMapper`` is for one that needs all
records.
"""

MAPPERS_OF_IMAGES = {"pretrain", "classify", "two_views"}
"""Names of the mappers that need no annotations; add your own if it needs none."""

MAPPERS_OF_CLASSES = {"classify"}
"""Names of the mappers of images whose "label" is the class of their folder."""


def build_mapper(cfg: CfgNode, is_train: bool) -> "NamingMapper":
    """Returns the mapper of ``INPUT.DATASET_MAPPER_NAME``; raises a ``UserError`` if it is unknown.

    The mapper raises a ``UserError`` for an image that it cannot read or that has another size
    than annotated.
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
    """Calls a mapper, and names the image in its errors."""

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


class FixedViews:
    """A mapper that draws K augmented views of each image, the same ones at every visit.

    The view of a visit is the first number drawn from torch's generator, which the stream seeds by
    position. Everything else depends on the views' seed, the record's index (``VIEW_ROW``, see
    ``number_records``) and the number of the view.
    """

    def __init__(self, mapper: Mapper, count: int, seed: int = 0) -> None:
        """Takes a mapper that draws a view, the number of views K, and their seed."""
        check_input_keys(
            ("FIXED_VIEWS.COUNT", count, count >= 1, "positive"),
            ("FIXED_VIEWS.SEED", seed, seed >= 0, "0 or more"),
        )
        self.mapper = mapper
        self.count = count
        self.seed = seed

    def __call__(self, dataset_dict: dict[str, Any]) -> dict[str, Any] | DataError | None:
        return self.view(dataset_dict, choose_view(self.count))

    def view(self, dataset_dict: dict[str, Any], number: int) -> dict[str, Any] | DataError | None:
        """Returns the mapper's output for view ``number``, from 0 to K - 1, of a record."""
        row = dataset_dict[VIEW_ROW]
        record = {key: value for key, value in dataset_dict.items() if key != VIEW_ROW}
        with preserved_randomness():
            seed_place(self.seed, VIEW, row, number)
            return self.mapper(record)


def choose_view(count: int) -> int:
    """Draws a view from 0 to ``count`` - 1; uses no random number if ``count`` is 1."""
    return 0 if count == 1 else int(torch.randint(count, ()))


def number_records(dataset: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the records with their index in the dataset as ``VIEW_ROW``."""
    return [{**record, VIEW_ROW: row} for row, record in enumerate(dataset)]
