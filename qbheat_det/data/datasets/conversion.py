# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Converts labelled images of any format to COCO's format.

The reader of each format returns ``LabelledImage`` objects. ``convert`` reads the image sizes that
they lack, assigns ids, and returns COCO's ``images``, ``annotations`` and ``categories`` lists.
"""

import contextlib
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

from qbheat_det.core.errors import UserError
from qbheat_det.core.text import join_first, one_line
from qbheat_det.data.checks import DataError, short
from qbheat_det.data.images import Size, read_sizes

MISSING_IMAGE = "missing image file"
"""The error kind for images that do not exist."""
_BROKEN = (KeyError, IndexError, TypeError, ValueError, AttributeError)
_LARGEST_XML = 100_000_000  # bytes


@dataclass
class Converted:
    """A data set that was converted to COCO's format.

    Attributes:
        lists: COCO's lists "images", "annotations" and "categories". Ids of images and annotations
            start from 1.
        places: maps (name of the list, id) of images and annotations to their location in the
            source, for messages.
        errors: content that could not be converted.
        warnings: content that may be a mistake.
    """

    lists: dict[str, list[Any]]
    places: dict[tuple[str, int], str] = field(default_factory=dict)
    errors: list[DataError] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def add(self, key: str, place: str, **entry: Any) -> int:
        """Appends an entry to the list ``key``, and returns its id."""
        id_ = len(self.lists[key]) + 1
        self.lists[key].append({"id": id_, **entry})
        self.places[key, id_] = place
        return id_


class Box(NamedTuple):
    """A box and its class. ``xywh`` is in pixels, or in shares of the sides if ``is_relative``."""

    place: str
    name: str
    xywh: Sequence[float]
    is_relative: bool
    is_crowd: bool


@dataclass
class LabelledImage:
    """An image and its objects, as read from a label file.

    Attributes:
        place: location in the label file, for messages.
        name: name, path or URL of the image in the label file.
        file: path of the image file, or an error if it was not found.
        size: (width, height) if the label file has them.
        boxes: valid objects; empty for an image without objects.
        errors: errors of invalid objects.
        is_skipped: whether the image was not labelled. Such images are left out.
        num_unread: number of annotations of the image, such as of other people, that are not read.
    """

    place: str
    name: str = ""
    file: str | DataError = ""
    size: Size | None = None
    boxes: list[Box] = field(default_factory=list)
    errors: list[DataError] = field(default_factory=list)
    is_skipped: bool = False
    num_unread: int = 0

    @contextlib.contextmanager
    def reading(self, place: str) -> Iterator[None]:
        """Catches exceptions about the content of an object, and adds them to ``errors``."""
        try:
            yield
        except _BROKEN as error:
            self.errors.append(DataError("wrong object", place, _describe(error)))

    def add(
        self,
        place: str,
        name: object,
        points: Iterable[Iterable[Any]],
        *,
        is_relative: bool = False,
        is_box: bool = False,
        is_crowd: bool = False,
    ) -> None:
        """Adds an object of class ``name`` with the bounding box of points (n, 2), see ``Box``.

        With ``is_box``, the points must be the top left and the bottom right corner. Raises a
        ``ValueError`` if the points are invalid or the class is missing.
        """
        points = [list(point) for point in points]
        try:
            xs, ys = zip(*((float(x), float(y)) for x, y in points), strict=True)
            is_finite = all(map(math.isfinite, (*xs, *ys)))
        except (TypeError, ValueError):
            is_finite = False
        if not is_finite:
            raise ValueError(f"its coordinates must be numbers, but are {short(points)}")
        if is_box and (xs[0] > xs[1] or ys[0] > ys[1]):
            raise ValueError(
                f"its right or bottom edge is before the left or top one: {short(points)}"
            )
        if name in (None, ""):
            raise ValueError("it has no class")
        xywh = (min(xs), min(ys), max(xs) - min(xs), max(ys) - min(ys))
        self.boxes.append(Box(place, str(name), xywh, is_relative, is_crowd))


@contextlib.contextmanager
def reading_record(place: str) -> Iterator[None]:
    """Converts exceptions about the content of a record to a ``UserError`` with its location."""
    try:
        yield
    except _BROKEN as error:
        raise UserError(f"{place}: {_describe(error)}") from error


def convert(
    images: Sequence[LabelledImage],
    names: Sequence[str],
    root: str | Path,
    *,
    by_index: bool = False,
) -> Converted:
    """Converts labelled images to COCO's format.

    Args:
        images: the labelled images.
        names: class names, in the order of the category ids.
        root: folder to which file names will be relative.
        by_index: whether the class of a box is its index (as a str) instead of its name.
    """
    categories = [{"id": index, "name": name} for index, name in enumerate(names)]
    converted = Converted({"images": [], "annotations": [], "categories": categories})
    if skipped := [image.place for image in images if image.is_skipped]:
        left_out = f"{len(skipped):,} images without labels are left out: {join_first(skipped)}"
        converted.warnings.append(left_out)
    if several := [image.place for image in images if image.num_unread]:
        read = f"the last annotation of {len(several):,} images with several is read"
        converted.warnings.append(f"{read}: {join_first(several)}")
    images = [image for image in images if not image.is_skipped]
    files = [image.file for image in images if isinstance(image.file, str) and not image.size]
    sizes = dict(zip(files, read_sizes(files), strict=True))
    ids = {str(index) if by_index else name: index for index, name in enumerate(names)}
    for image in images:
        converted.errors += image.errors
        file = image.file
        size = file if isinstance(file, DataError) else image.size or sizes[file]
        if isinstance(size, DataError):
            converted.errors.append(size)
            continue
        name, (width, height) = os.path.relpath(str(file), root), size
        id_ = converted.add("images", image.place, file_name=name, width=width, height=height)
        for box in image.boxes:
            if box.name not in ids:
                reason = f"its class {box.name!r} is not one of {short(list(names))}"
                converted.errors.append(DataError("wrong object", box.place, reason))
                continue
            scale = size * 2 if box.is_relative else (1, 1, 1, 1)
            bbox = [value * side for value, side in zip(box.xywh, scale, strict=True)]
            entry = {"image_id": id_, "category_id": ids[box.name], "bbox": bbox}
            converted.add("annotations", box.place, **entry, iscrowd=int(box.is_crowd))
    return converted


def parse_xml(file: Path) -> ElementTree.Element:
    """Returns the root of an XML file, or raises a ``ValueError``.

    Files that declare entities are refused, because entities can expand without limit.
    """
    try:
        content = file.read_bytes() if file.stat().st_size <= _LARGEST_XML else b"\0"
        if b"<!DOCTYPE" in content or b"<!ENTITY" in content or b"\0" in content:
            raise ValueError("it is too large, not in an encoding like ASCII, or has a DOCTYPE")
        return ElementTree.fromstring(content)
    except (OSError, ElementTree.ParseError, LookupError) as error:
        raise ValueError(f"it cannot be read as XML: {one_line(error)}") from error


def read_lines(file: Path) -> list[tuple[str, str]]:
    """Returns (location, text) of each line that is not blank."""
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise UserError(f"'{file}' cannot be read: {error.strerror}") from error
    numbered = enumerate(map(str.strip, lines), start=1)
    return [(f"{file}, line {number}", line) for number, line in numbered if line]


def _describe(error: Exception) -> str:
    return f"it has no {error}" if isinstance(error, KeyError) else one_line(error)
