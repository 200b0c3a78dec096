# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The account of a data set: how much of it is used, and what is left out for which reason.

Each image file, each label file and each box in a data set's folder is counted once, as used or as
left out. ``building.py`` counts the images and boxes that the readers of label files return, and
``other_files.py`` counts all other files.
"""

import os
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from qbheat_det.core.errors import UserError
from qbheat_det.core.text import join_first
from qbheat_det.data.checks import DataError

Item = Literal["image", "missing image", "label file", "box", "other file"]
_PLURALS: dict[Item, str] = {
    "image": "images",
    "missing image": "missing images",
    "label file": "label files",
    "box": "boxes",
    "other file": "other files",
}
_MAX_SHOWN = 5  # faults in an error
OF_LEFT_OUT_IMAGES = "of left out images"
"""``LeftOut.kind`` of the boxes and the label file of an image that is left out."""
MAX_LEFT_OUT = 0.1
"""Default of ``DATASETS.MAX_LEFT_OUT``: largest share of images or boxes with faults."""
LEFT_OUT_FILE = "left_out.txt"
"""File in the output folder that lists everything that is left out."""


@dataclass(frozen=True)
class LeftOut(DataError):
    """Something in a data set that is not used.

    Attributes:
        kind: short reason that follows the item in a summary, as in "2 images that cannot be read".
        where: path, and line or entry if it is part of a file.
        reason: explanation for the user, and its solution if it is not obvious.
        item: what is left out: an image, a box, and so on.
        is_fault: whether this is a mistake in the data set. An image of a part that is not needed
            is no fault, for example. Too many faults are an error (``Account.check``).
    """

    item: Item = "image"
    is_fault: bool = True


@dataclass
class Account:
    """What is used of the files and the boxes of a data set, and what is left out.

    Attributes:
        used: maps each type of item to the number of items that are used.
        clipped: locations of used boxes that reach beyond their image, and are clipped.
        left_out: the items that are not used.
        notes: what was assumed, replaced or joined, one sentence each.
        files: paths of the images that are counted as used, so that none is counted twice. Those in
            ``removed`` are among them.
        removed: paths of the images that were left out after they had been counted as used.
    """

    used: Counter[Item] = field(default_factory=Counter)
    clipped: list[str] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    files: set[str] = field(default_factory=set, repr=False)
    removed: set[str] = field(default_factory=set, repr=False)

    @property
    def faults(self) -> list[LeftOut]:
        """Items that should have been used."""
        return [left_out for left_out in self.left_out if left_out.is_fault]

    def count(self, item: Item) -> int:
        """Returns the number of items of a type, used or left out."""
        return self.used[item] + sum(left_out.item == item for left_out in self.left_out)

    def add(self, other: "Account") -> None:
        """Adds the account of another part of the same data set."""
        self.used.update(other.used)
        self.clipped += other.clipped
        self.left_out += other.left_out
        self.notes += [note for note in other.notes if note not in self.notes]
        self.files |= other.files
        self.removed |= other.removed

    def leave_out_image(self, fault: LeftOut, num_boxes: int, label_file: str) -> None:
        """Moves an image that is counted as used, with its boxes and label file, to ``left_out``.

        Args:
            fault: why the image is left out.
            num_boxes: number of its boxes that are counted as used.
            label_file: the file with the labels of only this image; "" if there is none.
        """
        self.used["image"] -= 1
        self.left_out.append(fault)
        self.leave_out_boxes_of(fault, num_boxes)
        if label_file:
            self.used["label file"] -= 1
            self.left_out.append(
                LeftOut(
                    kind=OF_LEFT_OUT_IMAGES,
                    where=label_file,
                    reason=fault.reason,
                    item="label file",
                    is_fault=False,
                )
            )
        self.used["box"] -= num_boxes

    def leave_out_boxes_of(self, image: LeftOut, num_boxes: int) -> None:
        """Adds the boxes of an image that is left out to ``left_out``. They are no faults."""
        box = LeftOut(
            kind=OF_LEFT_OUT_IMAGES,
            where=image.where,
            reason=image.reason,
            item="box",
            is_fault=False,
        )
        self.left_out += [box] * num_boxes

    def summarize(self) -> str:
        """Returns one line with the numbers of used images and boxes, and of all left out items.

        An example is "4 images with 9 boxes; left out: 2 images in HEIC format".
        """
        line = _format_count(self.used["image"], "image")
        if self.count("box"):
            line += f" with {_format_count(self.used['box'], 'box')}"
        if self.clipped:
            line += f" ({len(self.clipped):,} clipped)"
        texts = []
        for item in _PLURALS:
            kinds = Counter(left_out.kind for left_out in self.left_out if left_out.item == item)
            if item != "other file":
                texts += [f"{_format_count(count, item)} {kind}" for kind, count in kinds.items()]
        if texts:
            line += f"; left out: {', '.join(texts)}"
        return line

    def check(self, max_share: float | None = None, *, images_only: bool = False) -> None:
        """Raises a ``UserError`` if too many images, label files or boxes have faults.

        Items that are left out without a fault do not count. The message names the first faults,
        and a temporary file that lists all of them.

        Args:
            max_share: largest share of items with faults, from 0 to 1. With 0, each fault is an
                error. None stands for ``MAX_LEFT_OUT``.
            images_only: whether to check the images only.
        """
        if max_share is None:
            max_share = MAX_LEFT_OUT
        checked: list[tuple[Item, ...]] = [("image", "missing image")]
        if not images_only:
            checked += [("label file",), ("box",)]
        for items in checked:
            faults = [fault for fault in self.faults if fault.item in items]
            total = sum(self.used[item] for item in items) + len(faults)
            if len(faults) > max_share * total:
                raise UserError(self._describe_excess(faults, items[0], total, max_share))

    def _describe_excess(
        self, faults: Sequence[LeftOut], item: Item, total: int, max_share: float
    ) -> str:
        """Returns the message that more than a share of ``total`` items have faults.

        If the message does not name all faults, it names a temporary file that lists them.
        """
        parts = [join_first((fault.message for fault in faults), _MAX_SHOWN, separator="; ")]
        if len(faults) > _MAX_SHOWN:
            handle, path = tempfile.mkstemp(prefix="qbheat_left_out_", suffix=".txt")
            with os.fdopen(handle, "wb") as stream:
                stream.write(self.render().encode(errors="backslashreplace"))
            parts.append(f"'{path}' lists all of them")
        if max_share:
            parts.append(f"correct them, or allow more than {max_share:.0%} with --max-left-out")
        else:
            parts.append("correct them, or leave out --strict")
        share = f"{_format_count(len(faults), item)} of {total:,} would be left out"
        return f"{share}: {'; '.join(parts)}"

    def render(self) -> str:
        """Returns one line for each item that is left out or clipped, and for each note."""
        rows = [
            f"{left_out.item} {left_out.kind}: {left_out.message}" for left_out in self.left_out
        ]
        rows += [f"box clipped: {location}" for location in self.clipped]
        rows += [f"note: {note}" for note in self.notes]
        return "".join(f"{row}\n" for row in rows)

    def to_json(self) -> dict[str, Any]:
        """Returns the numbers of used and left out items, by type and reason, for ``run.json``."""
        numbers: dict[str, Any] = {}
        for item, plural in _PLURALS.items():
            kinds = Counter(left_out.kind for left_out in self.left_out if left_out.item == item)
            numbers[plural] = {"used": self.used[item], "left_out": dict(kinds)}
        numbers["boxes"]["clipped"] = len(self.clipped)
        return {**numbers, "notes": self.notes}


def join_accounts(accounts: Iterable[Account]) -> Account:
    """Returns the sum of accounts. If the same object occurs twice, it is added once."""
    total = Account()
    different = {id(account): account for account in accounts}
    for account in different.values():
        total.add(account)
    return total


def _format_count(count: int, item: Item) -> str:
    """Returns a number with its unit, as in "1 box" and "1,200 boxes"."""
    if count == 1:
        return f"1 {item}"
    return f"{count:,} {_PLURALS[item]}"
