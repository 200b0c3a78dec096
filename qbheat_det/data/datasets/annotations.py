# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The images, boxes and classes of a part of a data set, as COCO's lists."""

import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from qbheat_det.core.errors import UserError
from qbheat_det.core.text import join_first
from qbheat_det.data.checks import DataError

from .account import Account, LeftOut
from .file_tree import fold
from .labelled_image import MARGIN

Entry = dict[str, Any]
_KINDS_OF_ERRORS = {
    "missing image file": "without a file",
    "unreadable image": "that cannot be read",
    "truncated or damaged image": "with damaged pixels",
    "image of more than 8 bits": "of more than 8 bits",
    "image of another size than annotated": "of another size than annotated",
    "elongated image": "of extreme elongation",
}
"""Maps ``DataError.kind`` to ``LeftOut.kind``, which follows "1 image" in a summary."""


@dataclass
class Annotations:
    """The images, boxes and classes of a part of a data set.

    Attributes:
        origin: path of the data set, for messages.
        image_root: folder to which ``file_name`` of the images is relative.
        images: COCO's list of images.
        annotations: COCO's list of boxes.
        categories: COCO's list of classes, sorted by id.
        account: the used and left out items of the data set. All its parts share the account.
        original: path of the COCO file that has exactly these lists; "" if there is none.
        problem: why there are no labels; "" if there are some.
        broken: paths of the images that ``leave_out`` has removed.
        label_files: maps names of images to the file that has only their labels.
        clipped: maps names of images to the locations of their clipped boxes.
        sets: maps names of images to their data set, if several are joined.
    """

    origin: str
    image_root: str
    images: list[Entry]
    annotations: list[Entry]
    categories: list[Entry]
    account: Account = field(repr=False)
    original: str = ""
    problem: str = ""
    broken: list[str] = field(default_factory=list, repr=False)
    label_files: dict[str, str] = field(default_factory=dict, repr=False)
    clipped: dict[str, list[str]] = field(default_factory=dict, repr=False)
    sets: dict[str, str] = field(default_factory=dict, repr=False)

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes, in the order of their ids."""
        return tuple(str(entry["name"]) for entry in self.categories)

    @property
    def category_ids(self) -> tuple[int, ...]:
        """Ids of the classes, which may have gaps."""
        return tuple(entry["id"] for entry in self.categories)

    def check(self) -> None:
        """Raises a ``UserError`` if there is no box to train on or to evaluate with."""
        if self.problem:
            raise UserError(self.problem)
        if not any(not entry["iscrowd"] for entry in self.annotations):
            message = f"'{self.origin}' has no boxes"
            faults = [fault.message for fault in self.account.faults]
            if faults:
                message += f": {join_first(faults, 3, '; ')}"
            raise UserError(message)
        boxes = [entry["bbox"] for entry in self.annotations]
        num_clipped = sum(map(len, self.clipped.values()))
        if 2 * num_clipped > len(boxes) > 1:
            raise UserError(
                f"'{self.origin}': {num_clipped:,} of {len(boxes):,} boxes reach beyond their "
                "image, so they are corners instead of sizes, or of images of another size"
            )
        has_fractions = any(value % 1 for box in boxes for value in box)
        if max(map(max, boxes)) <= 1 and has_fractions:
            raise UserError(
                f"'{self.origin}': all boxes lie between 0 and 1, but they must be in pixels"
            )

    def note_classes(self) -> list[str]:
        """Returns notes about classes without a box, and about classes with almost equal names."""
        used = {entry["category_id"] for entry in self.annotations if not entry["iscrowd"]}
        unused = [repr(entry["name"]) for entry in self.categories if entry["id"] not in used]
        notes = []
        if unused and used:
            notes.append(f"'{self.origin}': classes without a box: {join_first(unused)}")
        return notes + note_spellings(self.class_names, self.origin)

    def leave_out(self, errors: Mapping[str, DataError]) -> None:
        """Removes images, and their boxes, by file name. Their errors are added to the account."""
        if not errors:
            return
        name_of_id = {image["id"]: image["file_name"] for image in self.images}
        num_boxes = Counter(name_of_id[entry["image_id"]] for entry in self.annotations)
        for name, error in errors.items():
            path = os.path.join(self.image_root, name)
            self.broken.append(path)
            if path in self.account.removed:  # counted already, as another part has it too
                continue
            self.account.removed.add(path)
            kind = _KINDS_OF_ERRORS.get(error.kind, f"with an error ({error.kind})")
            fault = LeftOut(kind=kind, where=error.where, reason=error.reason)
            self.account.leave_out_image(fault, num_boxes[name], self.label_files.get(name, ""))
            locations = set(self.clipped.get(name, ()))
            self.account.clipped = [
                location for location in self.account.clipped if location not in locations
            ]
        self.images = [image for image in self.images if image["file_name"] not in errors]
        self.annotations = [
            entry for entry in self.annotations if name_of_id[entry["image_id"]] not in errors
        ]
        self.original = ""

    def find_names(self, names: Iterable[str]) -> frozenset[str]:
        """Returns the names of the images with these names or paths."""
        given = frozenset(names)
        return frozenset(
            image["file_name"]
            for image in self.images
            if image["file_name"] in given
            or os.path.join(self.image_root, image["file_name"]) in given
        )

    def keep(self, file_names: Collection[str] | None = None) -> dict[str, list[Entry]]:
        """Returns COCO's three lists by name, restricted to the images ``file_names`` if given."""
        images = self.images
        annotations = self.annotations
        if file_names is not None:
            images = [image for image in images if image["file_name"] in file_names]
            ids = {image["id"] for image in images}
            annotations = [entry for entry in annotations if entry["image_id"] in ids]
        return {"images": images, "annotations": annotations, "categories": self.categories}


def note_spellings(class_names: Sequence[str], origin: str) -> list[str]:
    """Returns notes about equal names of classes, and names that differ in case or spaces only."""
    notes = []
    spellings: dict[str, list[str]] = {}
    for name in class_names:
        spellings.setdefault("".join(fold(name).split()), []).append(name)
    for names in spellings.values():
        if len(set(names)) > 1:
            shown = ", ".join(map(repr, names))
            notes.append(f"'{origin}': these are different classes: {shown}")
        elif len(names) > 1:
            notes.append(f"'{origin}': {len(names)} classes have the name {names[0]!r}")
    return notes


def check_same_classes(train: Annotations, val: Annotations) -> None:
    """Raises a ``UserError`` if two data sets have different classes or class orders."""
    if train.class_names == val.class_names:
        return
    files = f"'{train.origin}' and '{val.origin}'"
    for complete, lacking in ((train, val), (val, train)):
        missing = [repr(name) for name in complete.class_names if name not in lacking.class_names]
        if missing:
            raise UserError(
                f"the categories of {files} differ: '{lacking.origin}' lacks {join_first(missing)}"
            )
    train_names = join_first(map(repr, train.class_names))
    val_names = join_first(map(repr, val.class_names))
    raise UserError(
        f"the categories of {files} have the same names in a different order: {train_names} "
        f"against {val_names}"
    )


def is_inside(box: Sequence[float], image: Entry) -> bool:
    """Returns whether a box lies in an image, with a tolerance of ``MARGIN`` pixels.

    Args:
        box: [x, y, width, height] in pixels.
        image: the image's entry in COCO's list.
    """
    x, y, width, height = box
    fits_width = x >= -MARGIN and x + width <= image["width"] + MARGIN
    fits_height = y >= -MARGIN and y + height <= image["height"] + MARGIN
    return fits_width and fits_height
