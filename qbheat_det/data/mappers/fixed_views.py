# Copyright (c) qbheat_det contributors. Apache-2.0.
"""A fixed number of augmented views of every image, drawn once, in place of ever new ones.

A frozen encoder gives the same features for such a view at every visit, so they can be cached: see
``qbheat_det.feature_cache``.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from qbheat_det.core.seeding import VIEW, preserved_randomness, seed_place
from qbheat_det.data.checks import DataError, check_input_keys

Mapper = Callable[[dict[str, Any]], dict[str, Any] | DataError | None]
"""From a record to what the model takes; None skips an image, an error also reports why."""

VIEW_ROW = "view_row"
"""Key of a record that holds its index in the dataset, by which its views are seeded."""


@runtime_checkable
class PreparedMapper(Protocol):
    """A mapper that is given all records once: before training, and before workers are started."""

    def prepare(self, dataset_dicts: Sequence[dict[str, Any]]) -> None:
        """Does what takes all records, such as decoding a small set of images into memory."""

    def __call__(self, dataset_dict: dict[str, Any], /) -> dict[str, Any] | DataError | None:
        """As any ``Mapper``."""


class FixedViews:
    """A mapper through which each image has K augmented views, the same at every visit.

    Which of them a visit gets is the first number drawn from torch's generator, which the stream
    seeds by position; everything else is a function of the views' seed, the record's index
    (``VIEW_ROW``, see ``number_records``) and the number of the view.
    """

    def __init__(self, mapper: Mapper, count: int, seed: int = 0) -> None:
        """Takes a mapper that draws a view, K of each image, and the seed of the views."""
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
        """Returns what the mapper makes of a record in view ``number``, from 0 to K - 1."""
        row = dataset_dict[VIEW_ROW]
        record = {key: value for key, value in dataset_dict.items() if key != VIEW_ROW}
        with preserved_randomness():
            seed_place(self.seed, VIEW, row, number)
            return self.mapper(record)


def choose_view(count: int) -> int:
    """Draws a view from 0 to ``count`` - 1; nothing is drawn if there is one."""
    return 0 if count == 1 else int(torch.randint(count, ()))


def number_records(dataset: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the records with their index in the dataset as ``VIEW_ROW``."""
    return [{**record, VIEW_ROW: row} for row, record in enumerate(dataset)]
