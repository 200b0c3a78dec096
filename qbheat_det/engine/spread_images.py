# Copyright (c) qbheat_det contributors. Apache-2.0.
"""A few images of many, always the same ones, as a mapper makes them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from qbheat_det.core.errors import UserError

_TRIED = 10  # broken images in a row, before a place stays empty


class SpreadEntries(list[dict[str, Any]]):
    """Mapped images.

    Attributes:
        unreadable: names of the files that were wanted and could not be read.
    """

    def __init__(self) -> None:
        super().__init__()
        self.unreadable: list[str] = []


def read_spread(
    records: Sequence[Mapping[str, Any]], mapper: Callable[[dict[str, Any]], Any], number: int
) -> SpreadEntries:
    """Returns mapped images spread evenly over the records; all, where there are fewer.

    In the place of one that cannot be read stands the next that can.

    Args:
        records: dicts with ``file_name``.
        mapper: as of ``build_mapper``; it refuses an image with a ``UserError``, or by returning
            anything but a dict.
        number: how many are wanted.
    """
    number = min(number, len(records))
    entries = SpreadEntries()
    end = 0
    for index in range(number):
        start = max(end, index * len(records) // number)
        for end in range(start + 1, min(start + _TRIED, len(records)) + 1):
            entry = _map(mapper, records[end - 1])
            if entry is not None:
                entries.append(entry)
                break
            entries.unreadable.append(str(records[end - 1]["file_name"]))
    return entries


def _map(
    mapper: Callable[[dict[str, Any]], Any], record: Mapping[str, Any]
) -> dict[str, Any] | None:
    try:
        entry = mapper(dict(record))
    except UserError:  # a file that is broken, which is not the looker's matter
        return None
    return entry if isinstance(entry, dict) else None
