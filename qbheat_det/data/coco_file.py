# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The single checks of a COCO annotation file, each over a whole list of entries at once.

COCO's training file has 860,000 annotations; a pass in Python over one field of them takes
tenths of a second, so each check is one such pass and numpy does the rest.
"""

import gc
import json
import os
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from qbheat_det.errors import UserError

Entry = dict[str, Any]
BoolArray = NDArray[np.bool_]

_LISTS = {"images": "image", "annotations": "annotation", "categories": "category"}


class CocoFile:
    """An annotation file while it is checked.

    Every method raises :class:`UserError` with the file's name, and the entry's id where it
    has one.

    Attributes:
        path: the annotation file.
        warnings: what was odd but can be worked with, one sentence each.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.warnings: list[str] = []

    def fail(self, reason: str) -> NoReturn:
        raise UserError(f"{self.path}: {reason}")

    def warn(self, reason: str) -> None:
        self.warnings.append(f"{self.path}: {reason}")

    def read(self) -> dict[str, list[Entry]]:
        """Returns the entries of ``images``, ``annotations`` and ``categories``."""
        if not os.path.isfile(self.path):
            raise UserError(f"the annotation file '{self.path}' does not exist")
        try:
            with open(self.path, encoding="utf-8") as file, _no_garbage_collection():
                content = json.load(file)
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise UserError(f"{self.path} is not JSON: {error}") from error
        except OSError as error:
            raise UserError(f"{self.path} cannot be read: {error.strerror}") from error
        if not isinstance(content, dict):
            self.fail(
                "not COCO's instance format: the top level must be an object with the lists "
                f"{', '.join(_LISTS)}, but is a {type(content).__name__}"
            )
        for key, kind in _LISTS.items():
            if not isinstance(content.get(key), list):
                state = "must be a list" if key in content else "is missing"
                self.fail(f"not COCO's instance format: '{key}' {state}")
            for position, entry in enumerate(content[key]):
                if type(entry) is not dict:
                    self.fail(f"{key}[{position}] must be an object that describes one {kind}")
        return {key: content[key] for key in _LISTS}

    def column(
        self, entries: list[Entry], kind: str, key: str, type_: type, must: str
    ) -> list[Any]:
        """Returns one field of all entries, which must exist and be of a type."""
        values = [entry.get(key) for entry in entries]
        # By exact type, since Python counts ``true`` among the whole numbers.
        if not set(map(type, values)) <= {type_}:
            bad = next(i for i, value in enumerate(values) if type(value) is not type_)
            value = f"is {_short(values[bad])}" if key in entries[bad] else "is missing"
            self._fail_at(entries, kind, bad, f"{key} must be {must}, but {value}")
        return values

    def ids(self, entries: list[Entry], kind: str) -> list[int]:
        """Returns the ids of all entries, which must be whole numbers and occur once."""
        ids: list[int] = self.column(entries, kind, "id", int, "a whole number")
        if len(set(ids)) < len(ids):
            twice = [id_ for id_, count in Counter(ids).items() if count > 1]
            self.fail(f"{len(twice)} {kind} ids occur more than once: {quote(twice)}")
        return ids

    def sizes(self, images: list[Entry]) -> NDArray[np.float64]:
        """Returns width and height of all images, (N, 2), in pixels."""
        columns = []
        for key in ("width", "height"):
            must = "a positive whole number of pixels"
            values = self.column(images, "image", key, int, must)
            if min(values) <= 0:
                bad = next(i for i, value in enumerate(values) if value <= 0)
                reason = f"{key} must be {must}, but is {values[bad]}"
                self._fail_at(images, "image", bad, reason)
            columns.append(values)
        return np.array(columns, dtype=np.float64).T

    def image_files(self, images: list[Entry], image_root: str) -> None:
        """Checks that every image file exists, by listing the folders that are named."""
        names = self.column(images, "image", "file_name", str, "a file name")
        if not os.path.isdir(image_root):
            raise UserError(f"the image folder '{image_root}' of {self.path} does not exist")
        folders: dict[str, set[str]] = defaultdict(set)
        paths = [os.path.split(os.path.join(image_root, name)) for name in names]
        for folder in {folder for folder, _ in paths}:
            if os.path.isdir(folder):
                folders[folder].update(os.listdir(folder))
        missing = [
            name
            for name, (folder, base) in zip(names, paths, strict=True)
            if base not in folders[folder]
        ]
        if missing:
            self.fail(
                f"{len(missing)} of {len(names)} image files are not in '{image_root}': "
                f"{quote(missing)}; file_name must be relative to that folder"
            )

    def references(
        self, annotations: list[Entry], kind: str, known: Sequence[int]
    ) -> NDArray[np.int64]:
        """Returns which of the known images or categories each annotation belongs to, (A,)."""
        key = f"{kind}_id"
        values = self.column(annotations, "annotation", key, int, "a whole number")
        position = {id_: i for i, id_ in enumerate(known)}
        indices = np.array([position.get(value, -1) for value in values], dtype=np.int64)
        unknown = np.flatnonzero(indices < 0)
        if len(unknown):
            first = int(unknown[0])
            reason = f"{key} {values[first]} is not the id of any {kind}"
            self._fail_at(annotations, "annotation", first, reason, len(unknown))
        return indices

    def crowds(self, annotations: list[Entry]) -> BoolArray:
        """Returns which annotations are crowds, (A,); refuses ``ignore``, as Detectron2 does."""
        flags = {}
        for key in ("iscrowd", "ignore"):
            flags[key] = [annotation.get(key, 0) for annotation in annotations]
            bad = [i for i, flag in enumerate(flags[key]) if flag not in (0, 1)]
            if bad:
                self._fail_at(annotations, "annotation", bad[0], f"{key} must be 0 or 1", len(bad))
        ignored = np.flatnonzero(np.array(flags["ignore"], dtype=bool))
        if len(ignored):
            reason = "'ignore' is not supported by Detectron2; remove the annotation or the key"
            self._fail_at(annotations, "annotation", int(ignored[0]), reason, len(ignored))
        return np.array(flags["iscrowd"], dtype=bool)

    def segmentations(self, annotations: list[Entry]) -> BoolArray:
        """Returns which annotations have no segmentation or one that Detectron2 takes, (A,)."""
        left_out = np.zeros(len(annotations), dtype=bool)
        for i, annotation in enumerate(annotations):
            value = annotation.get("segmentation")
            if not value:
                continue
            if type(value) is list and all(type(polygon) is list for polygon in value):
                # Detectron2 leaves out an object of which no polygon has three points.
                left_out[i] = all(len(polygon) < 6 or len(polygon) % 2 for polygon in value)
            elif not (type(value) is dict and {"counts", "size"} <= value.keys()):
                reason = "segmentation must be a list of polygons, or RLE with counts and size"
                self._fail_at(annotations, "annotation", i, reason)
        self._warn_about(annotations, left_out, "have no polygon of three points and are left out")
        return ~left_out

    def boxes(self, annotations: list[Entry], sizes: NDArray[np.float64]) -> BoolArray:
        """Returns which annotations have a box with an area, (A,).

        Args:
            sizes: (A, 2), width and height of each annotation's image, in pixels.
        """
        must = "four finite numbers [x, y, width, height] in pixels"
        rows = self.column(annotations, "annotation", "bbox", list, must)
        types = set(map(type, chain.from_iterable(rows)))
        if not (set(map(len, rows)) <= {4} and types <= {int, float}):
            for i, row in enumerate(rows):
                if len(row) != 4 or not set(map(type, row)) <= {int, float}:
                    reason = f"bbox must be {must}, but is {_short(row)}"
                    self._fail_at(annotations, "annotation", i, reason)
        boxes = np.fromiter(chain.from_iterable(rows), np.float64, 4 * len(rows)).reshape(-1, 4)
        low, high = boxes[:, :2], boxes[:, :2] + boxes[:, 2:]

        def refuse(bad: BoolArray, reason: str) -> None:
            if bad.any():
                first = int(bad.argmax())
                reason = f"bbox {rows[first]} {reason}"
                self._fail_at(annotations, "annotation", first, reason, int(bad.sum()))

        refuse(~_every(np.isfinite(boxes)), f"must be {must}")
        refuse(~_every(boxes[:, 2:] >= 0), "has a negative width or height")
        if len(boxes) and boxes.max() <= 1 and (boxes % 1).any():
            self.fail("all boxes lie between 0 and 1; bbox must be in pixels, not relative")
        has_area = _every(boxes[:, 2:] > 0)
        refuse(
            has_area & ~_every((high > 0) & (low < sizes)),
            "lies wholly outside its image; bbox must be [x, y, width, height] in pixels",
        )
        # No error, since COCO's own training file has two of them; Detectron2 drops them.
        self._warn_about(annotations, ~has_area, "have a box without area and are left out")
        # One pixel is rounding, which COCO's own file has.
        beyond = ~_every((low >= -1) & (high <= sizes + 1))
        self._warn_about(annotations, beyond, "have a box beyond the image, which is clipped")
        return has_area

    def _warn_about(self, annotations: list[Entry], which: BoolArray, what: str) -> None:
        if which.any():
            first = annotations[int(which.argmax())]["id"]
            self.warn(f"{which.sum()} annotations {what}, the first with id {first}")

    def _fail_at(
        self, entries: list[Entry], kind: str, position: int, reason: str, count: int = 1
    ) -> NoReturn:
        id_ = entries[position].get("id")
        name = f"{kind} id {id_}" if id_ is not None else f"{kind} number {position + 1}"
        more = f" ({count - 1} more like it)" if count > 1 else ""
        self.fail(f"{name}: {reason}{more}")


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Halves the time of reading a large file, whose millions of lists hold no cycles."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def quote(values: Collection[object]) -> str:
    """Returns the first three values, quoted, and whether there are more."""
    shown = ", ".join(repr(value) for value in list(values)[:3])
    return shown + (", …" if len(values) > 3 else "")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "…"


def _every(conditions: BoolArray) -> BoolArray:
    """Returns for each row whether all of it is true."""
    return np.asarray(conditions.all(axis=1))
