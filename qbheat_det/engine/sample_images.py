# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The same few images of a data set each time, spread evenly over it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog

from qbheat_det.core.errors import UserError
from qbheat_det.data import build_mapper

_MAX_TRIED = 10  # consecutive images that cannot be read before a position is left out


class SpreadEntries(list[dict[str, Any]]):
    """Mapped images, and in ``unreadable`` the names of the files that could not be read."""

    def __init__(self) -> None:
        super().__init__()
        self.unreadable: list[str] = []


def read_spread(
    records: Sequence[Mapping[str, Any]], mapper: Callable[[dict[str, Any]], Any], number: int
) -> SpreadEntries:
    """Returns that many mapped images, spread evenly over the records; all if there are fewer.

    An image that cannot be read, for which the mapper raises a ``UserError`` or returns something
    else than a dict, is replaced by the next that can.
    """
    number = min(number, len(records))
    entries = SpreadEntries()
    end = 0
    for index in range(number):
        start = max(end, index * len(records) // number)
        for end in range(start + 1, min(start + _MAX_TRIED, len(records)) + 1):
            try:
                entry = mapper(dict(records[end - 1]))
            except UserError:
                entry = None
            if isinstance(entry, dict):
                entries.append(entry)
                break
            entries.unreadable.append(str(records[end - 1]["file_name"]))
    return entries


def load_fixed_images(cfg: CfgNode, number: int) -> list[dict[str, Any]]:
    """Returns images of the first test set, or of the first training set, mapped as in inference.

    Raises:
        UserError: no image can be read.
    """
    name = (*cfg.DATASETS.TEST, *cfg.DATASETS.TRAIN)[0]
    images = read_spread(DatasetCatalog.get(name), build_mapper(cfg, is_train=False), number)
    if not images:
        raise UserError(f"no image of the data set '{name}' can be read")
    return list(images)
