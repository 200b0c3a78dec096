# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The validation of a COCO annotation file: one pass that collects everything that is wrong."""

import gc
import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain

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
    """An annotation file, separated into what is sound and what is not.

    Attributes:
        json_file: the file.
        images, annotations: entries without an error, as they are in the file.
        categories: those without an error, in contiguous order: by id, as Detectron2 sorts them.
        errors: one for each thing that is wrong.
        warnings: messages about what is odd but can be worked with.
    """

    def __init__(
        self, json_file: str, image_root: str, needed: Sequence[str] = tuple(_LISTS)
    ) -> None:
        """Reads and checks a file.

        Args:
            json_file: the file.
            image_root: folder that file names are relative to.
            needed: lists that it must have; without "annotations", images need an id and a file.

        Raises:
            UserError: nothing can be said about single entries: the file or the image folder does
                not exist, the file is not JSON, or not COCO, or has no images or no categories.
        """
        self.json_file = json_file
        self.errors: list[DataError] = []
        self.warnings: list[str] = []
        self.annotations: list[Entry] = []
        self.categories: list[Entry] = []
        self._lists = self._read(needed)
        if not os.path.isdir(image_root):
            raise UserError(f"the image folder '{image_root}' of {json_file} does not exist")
        if "categories" in needed:
            self.categories = self._check_categories()
        self.images = self._check_images(image_root, with_sizes="annotations" in needed)
        if "annotations" in needed:
            self.annotations = self._check_annotations()

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names in contiguous order."""
        return tuple(entry["name"] for entry in self.categories)

    @property
    def category_ids(self) -> tuple[int, ...]:
        """Ids in the file, in the same order; may have holes."""
        return tuple(entry["id"] for entry in self.categories)

    def _read(self, needed: Sequence[str]) -> dict[str, list[Entry]]:
        """Returns the entries of the lists; those that are no objects become errors."""
        if not os.path.isfile(self.json_file):
            raise UserError(f"the annotation file '{self.json_file}' does not exist")
        collects = gc.isenabled()
        gc.disable()  # halves the time for large files, whose millions of lists hold no cycles
        try:
            with open(self.json_file, encoding="utf-8") as file:
                content = json.load(file)
        except (ValueError, RecursionError, OSError) as error:
            raise UserError(f"{self.json_file} cannot be read as JSON: {error}") from error
        finally:
            if collects:
                gc.enable()
        lists: dict[str, list[Entry]] = {}
        for key in needed:
            entries = content.get(key) if isinstance(content, dict) else None
            if not isinstance(entries, list) or not (entries or key == "annotations"):
                found = "empty" if entries == [] else "missing or no list"
                raise UserError(f"{self.json_file} is not in COCO's format: '{key}' is {found}")
            lists[key] = [entry for entry in entries if type(entry) is dict]
            for position, entry in enumerate(entries):
                if type(entry) is not dict:
                    where = f"{self.json_file}: {key}[{position}]"
                    reason = f"must be an object, but is {short(entry)}"
                    self.errors.append(DataError(f"{_LISTS[key]} of a wrong type", where, reason))
        return lists

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
            self.errors.append(DataError(found[0], f"{self.json_file}: {kind} {name}", found[1]))
        return kept

    def _with_ids(self, key: str) -> list[Entry]:
        """Returns the entries whose id is a whole number that no earlier entry has."""
        entries, kind = self._lists[key], _LISTS[key]
        seen: set[int] = set()

        def find(entry: Entry) -> Found:
            id_ = entry.get("id")
            if type(id_) is not int:
                return f"{kind} without a sound id", must_be(entry, "id", "a whole number")
            if not -_MAX_ID < id_ < _MAX_ID:
                reason = "the id must be below 2**53, above which evaluation mixes ids up"
                return f"{kind} id too large", reason
            if id_ in seen:
                return f"{kind} id twice", "the id occurs more than once, here again"
            seen.add(id_)
            return None

        return self._keep(entries, kind, find)

    def _check_categories(self) -> list[Entry]:
        def find(entry: Entry) -> Found:
            kind, name = "category without a sound name", entry.get("name")
            if type(name) is not str:
                return kind, must_be(entry, "name", "a text")
            try:
                name.encode("utf-8")
            except UnicodeEncodeError:
                return kind, "the name holds half a character (a lone surrogate)"
            return None

        entries = self._keep(self._with_ids("categories"), "category", find)
        self._warn_if_repeated([entry["name"] for entry in entries], "category names")
        return sorted(entries, key=lambda entry: int(entry["id"]))

    def _check_images(self, image_root: str, *, with_sizes: bool) -> list[Entry]:
        """Returns the images of a sound size whose file is in the listing of its folder."""
        listed: dict[str, set[str]] = {}

        def exists(name: str) -> bool:
            folder, base = os.path.split(os.path.join(image_root, name))
            if folder not in listed:
                listed[folder] = set(os.listdir(folder)) if os.path.isdir(folder) else set()
            return base in listed[folder]

        def find(entry: Entry) -> Found:
            for key in ("width", "height") if with_sizes else ():
                if type(entry.get(key)) is not int or not 0 < entry[key] <= _MAX_SIDE:
                    must = must_be(entry, key, "a positive whole number of pixels")
                    return f"image without a sound {key}", must
            name = entry.get("file_name")
            if type(name) is not str:
                must = must_be(entry, "file_name", "a file name")
                return "image without a sound file_name", must
            if not exists(name):
                where = f"in '{image_root}', which file_name must be relative to"
                return "missing image file", f"there is no file {short(name)} {where}"
            return None

        images = self._keep(self._with_ids("images"), "image", find)
        self._warn_if_repeated([image["file_name"] for image in images], "image file names")
        return images

    def _check_annotations(self) -> list[Entry]:
        """Returns the sound ones; what belongs to an unsound image or category falls with it."""
        size_of = {image["id"]: (image["width"], image["height"]) for image in self.images}
        sound = {"image": set(size_of), "category": set(self.category_ids)}
        known = {
            kind: {e["id"] for e in self._lists[key] if type(e.get("id")) is int}
            for kind, key in (("image", "images"), ("category", "categories"))
        }

        def find(entry: Entry) -> Found:
            for kind, ids in known.items():
                key = f"{kind}_id"
                if type(entry.get(key)) is not int or entry[key] not in ids:
                    return f"unknown {kind}", must_be(
                        entry, key, f"an id in the list of {kind} entries"
                    )
            if all(entry[f"{kind}_id"] in ids for kind, ids in sound.items()):
                return find_shape_error(entry, size_of[entry["image_id"]])
            return None

        entries = self._keep(self._with_ids("annotations"), "annotation", find)
        entries = [
            entry
            for entry in entries
            if all(entry[f"{kind}_id"] in ids for kind, ids in sound.items())
        ]
        entries = self._check_boxes_together(entries)
        self._warn_about(entries, [not has_polygon(e) for e in entries], "have no polygon")
        self._warn_about(entries, [not has_area(e) for e in entries], "have a box without area")
        clipped = [is_clipped(e, size_of[e["image_id"]]) for e in entries]
        self._warn_about(entries, clipped, "have a box beyond the image, which is clipped")
        zeros = [e["id"] == 0 for e in entries]
        self._warn_about(entries, zeros, "have id 0, which means 'no match' to pycocotools")
        return entries

    def _check_boxes_together(self, entries: list[Entry]) -> list[Entry]:
        """Returns the annotations if boxes are in pixels, without empty ones if these are many."""
        values = list(chain.from_iterable(entry["bbox"] for entry in entries))
        if values and max(values) <= 1 and any(value % 1 for value in values):
            relative = "all boxes lie between 0 and 1; bbox must be in pixels, not relative"
            self.errors.append(DataError("relative boxes", self.json_file, relative))
            return []
        if sum(not has_area(entry) for entry in entries) <= _SHARE_WITHOUT_AREA * len(entries):
            return entries

        def find(entry: Entry) -> Found:
            reason = f"bbox {short(entry['bbox'])} has no area; correct or remove it"
            return None if has_area(entry) else ("box without area", reason)

        return self._keep(entries, "annotation", find)

    def _warn_about(self, entries: list[Entry], which: list[bool], what: str) -> None:
        ids = [entry["id"] for entry, is_odd in zip(entries, which, strict=True) if is_odd]
        if ids:
            first = f"the first with id {ids[0]}"
            self.warnings.append(f"{self.json_file}: {len(ids)} annotations {what}, {first}")

    def _warn_if_repeated(self, values: list[str], what: str) -> None:
        twice = [repr(value) for value, count in Counter(values).items() if count > 1]
        if twice:
            some = join_first(twice)
            self.warnings.append(f"{self.json_file}: {what} occur more than once: {some}")
