# Copyright (c) qbheat_det contributors. Apache-2.0.
"""A fixed number of augmented views of every image, drawn once, in place of ever new ones.

What a frozen encoder makes of such a view is the same at every visit, so that it can be cached.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from qbheat_det.core.errors import UserError
from qbheat_det.data.errors import DataError
from qbheat_det.data.seeding import VIEW, preserved_randomness, seed_place

Mapper = Callable[[dict[str, Any]], dict[str, Any] | DataError | None]
"""From a record to what the model takes; None skips an image, an error also reports why."""

VIEW_ROW = "view_row"
"""Key of a record that holds its index in the dataset, by which its views are seeded."""


class FixedViews:
    """A mapper through which each image has K augmented views, the same at every visit.

    Which of them a visit gets is the first number drawn from torch's generator, which the stream
    seeds by position; everything else is a function of the views' seed, the record's index
    (``VIEW_ROW``, see ``number_records``) and the number of the view.
    """

    def __init__(self, mapper: Mapper, count: int, seed: int = 0) -> None:
        """
        Args:
            mapper: draws a view.
            count: K, views of each image.
            seed: of the views.

        Raises:
            UserError: ``count`` is not positive or ``seed`` is negative.
        """
        if count < 1:
            raise UserError(
                f"INPUT.FIXED_VIEWS.COUNT must be 0, for ever new views, or more, but is {count}"
            )
        if seed < 0:
            raise UserError(f"INPUT.FIXED_VIEWS.SEED must not be negative, but is {seed}")
        self.mapper = mapper
        self.count = count
        self.seed = seed

    def prepare(self, dataset_dicts: Sequence[dict[str, Any]]) -> None:
        """Gives all records to a mapper that has a ``prepare``."""
        if hasattr(self.mapper, "prepare"):
            self.mapper.prepare(dataset_dicts)

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
