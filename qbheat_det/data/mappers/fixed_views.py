# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Draws a fixed number of augmented views of every image, instead of a new one at each visit.

A frozen encoder returns the same features for a view at every visit, so they can be cached: see
``qbheat_det.feature_cache``.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from qbheat_det.core.seeding import VIEW, preserved_randomness, seed_place
from qbheat_det.data.checks import DataError, check_input_keys

Mapper = Callable[[dict[str, Any]], dict[str, Any] | DataError | None]
"""Maps a record to an entry of a batch. None skips the image; an error also reports why."""

VIEW_ROW = "view_row"
"""Key of a record's index in the data set, which seeds its views."""


@runtime_checkable
class PreparedMapper(Protocol):
    """A mapper that receives all records once, before training and before workers start."""

    def prepare(self, dataset_dicts: Sequence[dict[str, Any]]) -> None:
        """Prepares for these records, for example decodes a small set into memory."""

    def __call__(self, dataset_dict: dict[str, Any], /) -> dict[str, Any] | DataError | None:
        """Like any ``Mapper``."""


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
