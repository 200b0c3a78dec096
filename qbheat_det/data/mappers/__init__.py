# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Dataset mappers, from a record of a data set to what a model takes, by the name in the config."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from detectron2.config import CfgNode
from detectron2.data import DatasetMapper
from detectron2.data.detection_utils import SizeMismatchError
from PIL.Image import DecompressionBombError

from qbheat_det.core.errors import UserError
from qbheat_det.data.checks import DataError

from .classification import ClassificationMapper
from .detr import DetrDatasetMapper, build_detr_crop
from .fixed_views import VIEW_ROW, CachedViews, FixedViews, Mapper, PreparedMapper, number_records
from .pretraining import PretrainingMapper, TwoViewMapper

__all__ = [
    "VIEW_ROW", "CachedViews", "ClassificationMapper", "DetrDatasetMapper", "FixedViews", "Mapper",
    "PreparedMapper", "PretrainingMapper", "TwoViewMapper", "build_detr_crop", "number_records",
]  # fmt: skip

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
    """Returns the mapper that ``INPUT.DATASET_MAPPER_NAME`` names.

    On an image that cannot be read, or is not of the annotated size, it raises a ``UserError``.

    Raises:
        UserError: there is no mapper of that name.
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
            reason = " ".join(str(error).split())
            raise UserError(
                f"image '{dataset_dict['file_name']}' cannot be used: {reason}"
            ) from error
