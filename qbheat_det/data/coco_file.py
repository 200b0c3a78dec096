# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The single checks of a COCO annotation file, each over a whole list of entries at once.

COCO's training file has 860,000 annotations; a pass in Python over one field of them takes
tenths of a second, so each check is one such pass and numpy does the rest.

A check returns the entries that are sound and notes a fault for each of the others, so that one
look finds everything: a later check only meets what the earlier ones let through.
"""

import gc
import json
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from qbheat_det.core.errors import UserError

from .faults import Fault

Entry = dict[str, Any]
BoolArray = NDArray[np.bool_]

_LISTS = {"images": "image", "annotations": "annotation", "categories": "category"}
_MAX_ID = 2**53  # above, COCO evaluation in floating point takes one id for another
_MAX_SIDE = 2**31 - 1  # of any image format, in pixels


class CocoFile:
    """An annotation file while it is checked.

    Attributes:
        path: the annotation file.
        faults: what is wrong, in the order of the checks.
        warnings: what was odd but can be worked with, one sentence each.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.faults: list[Fault] = []
        self.warnings: list[str] = []

    def fail(self, reason: str) -> NoReturn:
        """
        Raises:
            UserError: always; for a file of which nothing more can be said.
        """
        raise UserError(f"{self.path}: {reason}")

    def warn(self, reason: str) -> None:
        self.warnings.append(f"{self.path}: {reason}")

    def read(self, needed: Collection[str] = tuple(_LISTS)) -> dict[str, list[Entry]]:
        """Returns the entries of those of ``images``, ``annotations``, ``categories`` needed.

        Raises:
            UserError: the file does not exist, is not JSON, or has not these lists.
        """
        if not os.path.isfile(self.path):
            raise UserError(f"the annotation file '{self.path}' does not exist")
        try:
            with open(self.path, encoding="utf-8") as file, _no_garbage_collection():
                content = json.load(file)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{self.path} is not JSON: {error}") from error
        except OSError as error:
            raise UserError(f"{self.path} cannot be read: {error.strerror}") from error
        if not isinstance(content, dict):
            self.fail(
                "not COCO's instance format: the top level must be an object with the lists "
                f"{', '.join(needed)}, but is a {type(content).__name__}"
            )
        for key in needed:
            if not isinstance(content.get(key), list):
                state = "must be a list" if key in content else "is missing"
                self.fail(f"not COCO's instance format: '{key}' {state}")
        return {key: self._objects(content[key], key, _LISTS[key]) for key in needed}

    def keep(
        self,
        entries: list[Entry],
        kind: str,
        good: BoolArray | list[bool],
        fault: str,
        reason: str | Callable[[Entry], str],
    ) -> list[Entry]:
        """Returns the good entries, and notes a fault with its reason for each of the others."""
        if all(good) if isinstance(good, list) else good.all():
            return entries
        kept = []
        for position, (entry, is_good) in enumerate(zip(entries, good, strict=True)):
            if is_good:
                kept.append(entry)
            else:
                id_ = entry.get("id")
                name = f"id {short(id_)}" if id_ is not None else f"number {position + 1}"
                text = reason if isinstance(reason, str) else reason(entry)
                self.faults.append(Fault(fault, f"{self.path}: {kind} {name}", text))
        return kept

    def with_type(
        self, entries: list[Entry], kind: str, key: str, type_: type, must: str
    ) -> list[Entry]:
        """Returns the entries that have a field of a type."""
        # By exact type, since Python counts ``true`` among the whole numbers.
        good = [type(entry.get(key)) is type_ for entry in entries]
        return self.keep(
            entries, kind, good, f"{kind} without a sound {key}", lambda e: must_be(e, key, must)
        )

    def with_ids(self, entries: list[Entry], kind: str) -> list[Entry]:
        """Returns the entries whose id is a whole number that no earlier entry has."""
        entries = self.with_type(entries, kind, "id", int, "a whole number")
        good = [-_MAX_ID < entry["id"] < _MAX_ID for entry in entries]
        reason = "the id must be below 2**53, above which evaluation mixes ids up"
        entries = self.keep(entries, kind, good, f"{kind} id too large", reason)
        count = Counter(entry["id"] for entry in entries)
        if len(count) == len(entries):
            return entries
        last = {entry["id"]: i for i, entry in reversed(list(enumerate(entries)))}
        good = [last[entry["id"]] == i for i, entry in enumerate(entries)]
        return self.keep(
            entries,
            kind,
            good,
            f"{kind} id twice",
            lambda e: (
                f"the id occurs more than once, here again; {count[e['id']]} {kind} "
                "entries have it and need one each"
            ),
        )

    def with_sizes(self, images: list[Entry]) -> list[Entry]:
        """Returns the images whose width and height can be those of an image."""
        return self._with_side(self._with_side(images, "width"), "height")

    def with_files(self, images: list[Entry], image_root: str) -> list[Entry]:
        """Returns the images whose file exists, by listing the folders that are named.

        Raises:
            UserError: the image folder does not exist.
        """
        images = self.with_type(images, "image", "file_name", str, "a file name")
        if not os.path.isdir(image_root):
            raise UserError(f"the image folder '{image_root}' of {self.path} does not exist")
        paths = [os.path.split(os.path.join(image_root, image["file_name"])) for image in images]
        folders: dict[str, set[str]] = defaultdict(set)
        for folder in {folder for folder, _ in paths}:
            if os.path.isdir(folder):
                folders[folder].update(os.listdir(folder))
        good = [base in folders[folder] for folder, base in paths]
        there = f"in '{image_root}' ({good.count(True)} of {len(images)} files are there)"
        hint = "file_name must be relative to that folder"
        return self.keep(
            images,
            "image",
            good,
            "missing image file",
            lambda e: f"there is no file {short(e['file_name'])} {there}; {hint}",
        )

    def with_known(
        self, annotations: list[Entry], kind: str, known: Collection[int], sound: Collection[int]
    ) -> list[Entry]:
        """Returns the annotations that belong to a sound image or category.

        Args:
            known: all ids of the file, of which an annotation must name one.
            sound: those without a fault. What belongs to the others falls with them, silently.
        """
        key = f"{kind}_id"
        annotations = self.with_type(annotations, "annotation", key, int, "a whole number")
        good = [annotation[key] in known for annotation in annotations]
        annotations = self.keep(
            annotations,
            "annotation",
            good,
            f"unknown {kind}",
            lambda e: f"{key} {short(e[key])} is not the id of any {kind}",
        )
        if len(sound) == len(known):
            return annotations
        return [annotation for annotation in annotations if annotation[key] in sound]

    def with_flags(self, annotations: list[Entry]) -> list[Entry]:
        """Returns the annotations without ``ignore``, as Detectron2 wants it, and a sound crowd."""
        for key in ("iscrowd", "ignore"):
            good = [annotation.get(key, 0) in (0, 1) for annotation in annotations]
            fault = f"annotation without a sound {key}"
            annotations = self.keep(annotations, "annotation", good, fault, f"{key} must be 0 or 1")
        reason = "'ignore' is not supported by Detectron2; remove the annotation or the key"
        good = [annotation.get("ignore", 0) == 0 for annotation in annotations]
        return self.keep(annotations, "annotation", good, "ignored annotation", reason)

    def warn_about(
        self, annotations: list[Entry], which: BoolArray | list[bool], what: str
    ) -> None:
        """Warns of annotations with their number and the first id, if there are any."""
        found = np.flatnonzero(which)
        if len(found):
            first = annotations[int(found[0])]["id"]
            self.warn(f"{len(found)} annotations {what}, the first with id {first}")

    def warn_if_repeated(self, values: list[str], what: str) -> None:
        """Warns of values that occur more than once, if there are any."""
        twice = [value for value, count in Counter(values).items() if count > 1]
        if twice:
            self.warn(f"{len(twice)} {what} occur more than once: {quote(twice)}")

    def _objects(self, entries: list[Any], key: str, kind: str) -> list[Entry]:
        objects = [entry for entry in entries if type(entry) is dict]
        for position, entry in enumerate(entries if len(objects) < len(entries) else ()):
            if type(entry) is not dict:
                reason = f"must be an object that describes one {kind}, but is {short(entry)}"
                where = f"{self.path}: {key}[{position}]"
                self.faults.append(Fault(f"{kind} of a wrong type", where, reason))
        return objects

    def _with_side(self, images: list[Entry], key: str) -> list[Entry]:
        must = "a positive whole number of pixels"
        images = self.with_type(images, "image", key, int, must)
        good = [0 < image[key] <= _MAX_SIDE for image in images]
        fault = f"image without a sound {key}"
        return self.keep(images, "image", good, fault, lambda e: must_be(e, key, must))


def must_be(entry: Entry, key: str, must: str) -> str:
    """Says what a field of an entry must be, and what it is."""
    found = f"is {short(entry[key])}" if key in entry else "is missing"
    return f"{key} must be {must}, but {found}"


def short(value: object) -> str:
    """Returns a value as it stands in Python, cut to 60 characters, on one line."""
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "…"


def quote(values: Collection[object]) -> str:
    """Returns the first three values, quoted, and whether there are more."""
    shown = ", ".join(short(value) for value in list(values)[:3])
    return shown + (", …" if len(values) > 3 else "")


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
