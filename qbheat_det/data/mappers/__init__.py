# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Dataset mappers, which convert a record of a data set to an input of a model.

``INPUT.DATASET_MAPPER_NAME`` selects one of ``DATASET_MAPPERS``. ``FixedViews`` wraps a mapper so
that each image has a fixed number of augmented views. A frozen encoder returns the same features
each time that it sees a view, so ``qbheat_det.feature_cache`` can store them.
"""

import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.data import DatasetMapper
from detectron2.data.detection_utils import SizeMismatchError
from PIL.Image import DecompressionBombError

from qbheat_det.core.errors import UserError
from qbheat_det.core.seeding import VIEW, preserved_randomness, seed_place
from qbheat_det.data.checks import DataError, check_input_keys
from qbheat_det.data.images import is_readable, name_unreadable
from qbheat_det.modeling.contracts import TILE

from .crops import ClassificationMapper, PretrainingMapper, TwoViewMapper
from .detection import DetectionMapper, DetrDatasetMapper, TileMapper, build_detr_crop
from .sizes import find_size
from .upright import UprightMapper

__all__ = [
    "ClassificationMapper",
    "DetectionMapper",
    "DetrDatasetMapper",
    "PretrainingMapper",
    "TileMapper",
    "TwoViewMapper",
    "UprightMapper",
    "build_detr_crop",
    "find_size",
]

Mapper = Callable[[dict[str, Any]], dict[str, Any] | DataError | None]
"""Maps a record of a data set to a dict of a batch.

If the result is None or an error, the image is skipped. Errors are reported.
"""

VIEW_ROW = "view_row"
"""Key of a record: its index in the data set, by which caches find its views."""
VIEW_SEED = "view_seed"
"""Key of a record: the seed of the random numbers of its views."""


DATASET_MAPPERS: dict[str, Callable[[CfgNode, bool], Mapper]] = {
    "default": DetectionMapper,
    "detr": DetrDatasetMapper,
    "pretrain": PretrainingMapper,
    "classify": ClassificationMapper,
    "two_views": TwoViewMapper,
}
"""Functions ``(cfg, is_train) -> mapper`` by name, for ``INPUT.DATASET_MAPPER_NAME``.

To add a mapper, set ``DATASET_MAPPERS["mine"] = MyMapper`` before the data loader is built. If it
is not for detectors, also add its name to the ``mappers`` of its task (``qbheat_det.tasks``).
Subclasses of Detectron2's ``DatasetMapper`` can be added unchanged. With
``DATALOADER.SIZE_GROUPING``, as in the default recipe, a mapper also needs ``find_size``. If TIFFs
may have an EXIF orientation, derive mappers from ``UprightMapper`` instead, which turns these files
only once.
"""

_UNREADABLE = (OSError, SyntaxError, SizeMismatchError, DecompressionBombError)
"""Exceptions that mean that an image cannot be read.

Decoders raise other exceptions too, but a mapper with a bug may raise these as well.
"""


def build_mapper(cfg: CfgNode, is_train: bool) -> "NamingMapper":
    """Builds the mapper that ``INPUT.DATASET_MAPPER_NAME`` names.

    The mapper returns a ``DataError`` for an image that cannot be read, or whose size differs from
    the annotated size.

    Raises:
        UserError: the name is unknown, or the mapper cannot crop tiles and ``INPUT.TILE`` is set.
    """
    name = cfg.INPUT.DATASET_MAPPER_NAME
    if name not in DATASET_MAPPERS:
        raise UserError(
            f"INPUT.DATASET_MAPPER_NAME is '{name}', but the mappers are "
            f"{', '.join(sorted(DATASET_MAPPERS))}"
        )
    mapper = DATASET_MAPPERS[name](cfg, is_train)
    if cfg.INPUT.TILE:
        if not isinstance(mapper, DatasetMapper):
            raise UserError(
                f"INPUT.TILE is for detectors, but INPUT.DATASET_MAPPER_NAME is '{name}': set it "
                "to 0, or use a subclass of Detectron2's DatasetMapper"
            )
        mapper = TileMapper(mapper)
    return NamingMapper(mapper)


@dataclass(frozen=True)
class NamingMapper:
    """Wraps a mapper to return a ``DataError``, instead of raising, if an image cannot be read.

    Other exceptions of the mapper, such as those of a bug, are raised.
    """

    mapper: Mapper

    def __call__(self, dataset_dict: dict[str, Any]) -> dict[str, Any] | DataError | None:
        try:
            return self.mapper(dataset_dict)
        except Exception as error:
            is_reading_error = isinstance(error, _UNREADABLE)
            if not is_reading_error and is_readable(dataset_dict):
                raise
            return name_unreadable(dataset_dict["file_name"], error)

    def find_size(self, dataset_dict: dict[str, Any]) -> tuple[int, int]:
        return find_size(self.mapper, dataset_dict)


class FixedViews:
    """A mapper that returns one of K fixed augmented views of each image.

    Each call draws the number of the view, from 0 to K - 1, with torch's global generator. The
    augmentation of a view depends only on ``seed``, on the record's ``VIEW_SEED``, and on the
    number of the view. Records get their ``VIEW_SEED`` from ``number_records``.
    """

    def __init__(self, mapper: Mapper, count: int, seed: int = 0) -> None:
        """
        Args:
            mapper: returns a randomly augmented image.
            count: number K of views.
            seed: seed of all views.

        Raises:
            UserError: ``count`` or ``seed`` is invalid.
        """
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
        record = dict(dataset_dict)
        record.pop(VIEW_ROW, None)
        view_seed = record.pop(VIEW_SEED)
        with preserved_randomness():
            seed_place(self.seed, VIEW, view_seed, number)
            return self.mapper(record)

    def find_size(self, dataset_dict: dict[str, Any]) -> tuple[int, int]:
        number = choose_view(self.count)
        with preserved_randomness():
            seed_place(self.seed, VIEW, dataset_dict[VIEW_SEED], number)
            return find_size(self.mapper, dataset_dict)


def choose_view(count: int) -> int:
    """Draws a view number below ``count``. Does not draw a random number if ``count`` is 1."""
    if count == 1:
        return 0
    return int(torch.randint(count, ()))


def find_root(records: Sequence[Mapping[str, Any]]) -> tuple[str, list[str]]:
    """Returns the innermost folder of all image files, and the files' paths relative to it."""
    if not records:
        return "", []
    paths = [os.path.abspath(os.fspath(record["file_name"])) for record in records]
    root = os.path.commonpath([os.path.dirname(path) for path in paths])
    return root, [os.path.relpath(path, root) for path in paths]


def number_records(dataset: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the records with ``VIEW_ROW`` and ``VIEW_SEED``.

    The seed depends on the file's relative path and the tile, so it does not change if other images
    of the same folder are added to the data set.
    """
    _, names = find_root(dataset)
    numbered = []
    for row, (record, name) in enumerate(zip(dataset, names, strict=True)):
        seed = zlib.crc32(os.fsencode(f"{name} {record.get(TILE, '')}"))
        numbered.append({**record, VIEW_ROW: row, VIEW_SEED: seed})
    return numbered
