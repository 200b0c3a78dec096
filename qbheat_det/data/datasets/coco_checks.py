# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The validation of a COCO annotation file: one pass that collects everything that is wrong.

COCO's training file has 860,000 annotations with 40 million coordinates, so the check of one entry
is a few comparisons, and numbers are compared in C.
"""

import gc
import json
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, NoReturn

from qbheat_det.core.errors import UserError
from qbheat_det.core.text import join_first
from qbheat_det.data.errors import DataError

from .coco_shapes import (
    Entry,
    Found,
    find_shape_error,
    has_area,
    has_polygon,
    is_clipped,
    must_be,
    short,
)

_LISTS = {"images": "image", "annotations": "annotation", "categories": "category"}
_MAX_ID = 2**53  # above, COCO evaluation in floating point takes one id for another
_MAX_SIDE = 2**31 - 1  # of any image format, in pixels
_SHARE_WITHOUT_AREA = 1e-4  # COCO's own training file has two boxes without area in 860,001


class CocoFile:
    """An annotation file while it is checked.

    Attributes:
        path: the annotation file.
        lists: its entries, those of a wrong type left out.
        errors: what is wrong; each method adds its own.
        warnings: what is odd but can be worked with.
    """

    def __init__(self, path: str, needed: Sequence[str] = tuple(_LISTS)) -> None:
        """Reads the file.

        Args:
            path: the annotation file.
            needed: lists that it must have, of "images", "annotations" and "categories".

        Raises:
            UserError: the file does not exist, is not JSON, or lacks these lists, or it has no
                images or categories.
        """
        self.path = path
        self.errors: list[DataError] = []
        self.warnings: list[str] = []
        content = self._read()
        if not isinstance(content, dict):
            self._fail(
                "not COCO's instance format: the top level must be an object with the lists "
                f"{', '.join(needed)}, but is a {type(content).__name__}"
            )
        for key in needed:
            if not isinstance(content.get(key), list):
                state = "must be a list" if key in content else "is missing"
                self._fail(f"not COCO's instance format: '{key}' {state}")
        self.lists = {key: self._check_types(content[key], key) for key in needed}
        for key in needed:
            if not content[key] and key != "annotations":
                self._fail(f"the list '{key}' is empty")

    def warn(self, reason: str) -> None:
        """Adds a warning that names the file."""
        self.warnings.append(f"{self.path}: {reason}")

    def check_ids(self, entries: list[Entry], kind: str) -> list[Entry]:
        """Returns the entries whose id is a whole number that no earlier entry has."""
        count = Counter(entry["id"] for entry in entries if type(entry.get("id")) is int)
        seen: set[int] = set()

        def find(entry: Entry) -> Found:
            id_ = entry.get("id")
            if type(id_) is not int:
                return f"{kind} without a sound id", must_be(entry, "id", "a whole number")
            if not -_MAX_ID < id_ < _MAX_ID:
                reason = "the id must be below 2**53, above which evaluation mixes ids up"
                return f"{kind} id too large", reason
            if id_ in seen:
                reason = f"the id occurs more than once, here again; {count[id_]} {kind} entries"
                return f"{kind} id twice", f"{reason} have it and need one each"
            seen.add(id_)
            return None

        return self._keep(entries, kind, find)

    def check_categories(self) -> list[Entry]:
        """Returns the sound categories in contiguous order: by id, as Detectron2 sorts them."""

        def find(entry: Entry) -> Found:
            kind, name = "category without a sound name", entry.get("name")
            if type(name) is not str:
                return kind, must_be(entry, "name", "a text")
            try:
                name.encode("utf-8")
            except UnicodeEncodeError:
                return kind, "the name holds half a character (a lone surrogate)"
            return None

        entries = self.check_ids(self.lists["categories"], "category")
        entries = self._keep(entries, "category", find)
        self._warn_if_repeated([entry["name"] for entry in entries], "category names")
        return sorted(entries, key=lambda entry: int(entry["id"]))

    def check_images(self, image_root: str) -> list[Entry]:
        """Returns the images of a sound size whose file exists.

        Raises:
            UserError: the image folder does not exist.
        """

        def find(entry: Entry) -> Found:
            for key in ("width", "height"):
                if type(entry.get(key)) is not int or not 0 < entry[key] <= _MAX_SIDE:
                    must = "a positive whole number of pixels"
                    return f"image without a sound {key}", must_be(entry, key, must)
            return None

        images = self._keep(self.check_ids(self.lists["images"], "image"), "image", find)
        images = self.check_files(images, image_root)
        self._warn_if_repeated([image["file_name"] for image in images], "image file names")
        return images

    def check_files(self, images: list[Entry], image_root: str) -> list[Entry]:
        """Returns the images whose file exists, by listing the folders that are named.

        Raises:
            UserError: the image folder does not exist.
        """
        if not os.path.isdir(image_root):
            raise UserError(f"the image folder '{image_root}' of {self.path} does not exist")
        listed: dict[str, set[str]] = {}

        def exists(name: str) -> bool:
            folder, base = os.path.split(os.path.join(image_root, name))
            if folder not in listed:
                listed[folder] = set(os.listdir(folder)) if os.path.isdir(folder) else set()
            return base in listed[folder]

        names = [image.get("file_name") for image in images]
        there = sum(isinstance(name, str) and exists(name) for name in names)

        def find(entry: Entry) -> Found:
            name = entry.get("file_name")
            if type(name) is not str:
                return "image without a sound file_name", must_be(entry, "file_name", "a file name")
            if exists(name):
                return None
            where = f"in '{image_root}' ({there} of {len(images)} files are there)"
            hint = "file_name must be relative to that folder"
            return "missing image file", f"there is no file {short(name)} {where}; {hint}"

        return self._keep(images, "image", find)

    def check_annotations(self, images: list[Entry], categories: list[Entry]) -> list[Entry]:
        """Returns the sound annotations of sound images and categories.

        What belongs to an image or category with an error is left out with it, silently.

        Args:
            images: sound ones.
            categories: sound ones.
        """
        sound: dict[str, set[int]] = {}
        known: dict[str, set[int]] = {}
        for kind, key, entries in (
            ("image", "images", images),
            ("category", "categories", categories),
        ):
            sound[kind] = {entry["id"] for entry in entries}
            ids = (entry.get("id") for entry in self.lists[key])
            known[kind] = {id_ for id_ in ids if type(id_) is int}

        def find(entry: Entry) -> Found:
            for kind, ids in known.items():
                key = f"{kind}_id"
                if type(entry.get(key)) is not int:
                    must = must_be(entry, key, "a whole number")
                    return f"annotation without a sound {key}", must
                if entry[key] not in ids:
                    reason = f"{key} {short(entry[key])} is not the id of any {kind}"
                    return f"unknown {kind}", reason
            return None

        entries = self._keep(
            self.check_ids(self.lists["annotations"], "annotation"), "annotation", find
        )
        entries = [
            entry
            for entry in entries
            if entry["image_id"] in sound["image"] and entry["category_id"] in sound["category"]
        ]
        size_of = {image["id"]: (image["width"], image["height"]) for image in images}
        entries = self._keep(
            entries, "annotation", lambda entry: find_shape_error(entry, size_of[entry["image_id"]])
        )
        entries = self._check_boxes_together(entries)
        self._warn_about_annotations(entries, size_of)
        return entries

    def _check_boxes_together(self, entries: list[Entry]) -> list[Entry]:
        """Returns the annotations if boxes are in pixels, without empty ones if these are many."""
        values = list(chain.from_iterable(entry["bbox"] for entry in entries))
        if values and max(values) <= 1 and any(value % 1 for value in values):
            relative = "all boxes lie between 0 and 1; bbox must be in pixels, not relative"
            self.errors.append(DataError("relative boxes", self.path, relative))
            return []
        if sum(not has_area(entry) for entry in entries) <= _SHARE_WITHOUT_AREA * len(entries):
            return entries
        reason = "has no area; correct it, or remove the annotation"
        return self._keep(
            entries,
            "annotation",
            lambda e: (
                None if has_area(e) else ("box without area", f"bbox {short(e['bbox'])} {reason}")
            ),
        )

    def _warn_about_annotations(
        self, entries: list[Entry], size_of: dict[int, tuple[int, int]]
    ) -> None:
        for ids, what in (
            (
                [e["id"] for e in entries if not has_polygon(e)],
                "have no polygon of three points and are left out",
            ),
            (
                [e["id"] for e in entries if not has_area(e)],
                "have a box without area and are left out",
            ),
            (
                [e["id"] for e in entries if is_clipped(e, size_of[e["image_id"]])],
                "have a box beyond the image, which is clipped",
            ),
        ):
            if ids:
                self.warn(f"{len(ids)} annotations {what}, the first with id {ids[0]}")
        if any(entry["id"] == 0 for entry in entries):
            self.warn("annotation id 0 means 'no match' to pycocotools; number annotations from 1")

    def _keep(self, entries: list[Entry], kind: str, find: Callable[[Entry], Found]) -> list[Entry]:
        """Returns the entries in which ``find`` finds no error, and adds the errors of others."""
        kept = []
        for position, entry in enumerate(entries):
            found = find(entry)
            if found is None:
                kept.append(entry)
                continue
            id_ = entry.get("id")
            name = f"id {short(id_)}" if id_ is not None else f"number {position + 1}"
            self.errors.append(DataError(found[0], f"{self.path}: {kind} {name}", found[1]))
        return kept

    def _check_types(self, entries: list[Any], key: str) -> list[Entry]:
        kind, objects = _LISTS[key], []
        for position, entry in enumerate(entries):
            if type(entry) is dict:
                objects.append(entry)
                continue
            reason = f"must be an object that describes one {kind}, but is {short(entry)}"
            where = f"{self.path}: {key}[{position}]"
            self.errors.append(DataError(f"{kind} of a wrong type", where, reason))
        return objects

    def _warn_if_repeated(self, values: list[str], what: str) -> None:
        twice = [value for value, count in Counter(values).items() if count > 1]
        if twice:
            self.warn(f"{len(twice)} {what} occur more than once: {join_first(map(repr, twice))}")

    def _read(self) -> Any:
        if not os.path.isfile(self.path):
            raise UserError(f"the annotation file '{self.path}' does not exist")
        collects = gc.isenabled()
        gc.disable()  # halves the time for large files, whose millions of lists hold no cycles
        try:
            with open(self.path, encoding="utf-8") as file:
                return json.load(file)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{self.path} is not JSON: {error}") from error
        except OSError as error:
            raise UserError(f"{self.path} cannot be read: {error.strerror}") from error
        finally:
            if collects:
                gc.enable()

    def _fail(self, reason: str) -> NoReturn:
        raise UserError(f"{self.path}: {reason}")


def count_box_classes(annotations: Iterable[Entry]) -> dict[int, list[int]]:
    """Returns, by category id, the image id of each box that is trained on."""
    boxes: dict[int, list[int]] = defaultdict(list)
    for entry in annotations:
        if not entry.get("iscrowd", 0) and has_area(entry) and has_polygon(entry):
            boxes[entry["category_id"]].append(entry["image_id"])
    return boxes
