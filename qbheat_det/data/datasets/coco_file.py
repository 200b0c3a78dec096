# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Validates COCO annotation files, and collects all errors in one pass."""

import json
import logging
import os
from collections.abc import Callable, Collection, Sequence
from typing import Any

from qbheat_det.core.errors import UserError
from qbheat_det.core.text import join_first
from qbheat_det.data.checks import DataError, are_numbers, find_box_error, raise_first, short

from .conversion import MISSING_IMAGE, Converted

logger = logging.getLogger(__name__)

Entry = dict[str, Any]
Found = tuple[str, str] | None
"""(kind, reason) of an error, or None."""

_LISTS = {"images": "image", "annotations": "annotation", "categories": "category"}
_MARGIN = 1.5  # pixels by which rounded boxes reach beyond their image
_MAX_SHIFT = 30  # run lengths have at most seven groups of five bits


def _is_text(value: object) -> bool:
    return isinstance(value, str)


# A function that returns whether a value is valid, a text with the valid values, and the default.
Rule = tuple[Callable[[Any], bool], str, Any]
_ID: Rule = (
    # COCO evaluation stores ids as floats, which cannot represent all larger integers.
    lambda value: type(value) is int and abs(value) < 2**53,
    "a whole number below 2**53",
    None,
)
_SIDE: Rule = (
    lambda value: type(value) is int and 0 < value < 2**31,
    "a positive whole number of pixels",
    None,
)
_RULES: dict[str, dict[str, Rule]] = {
    "images": {"id": _ID, "file_name": (_is_text, "a file name", None)},
    "categories": {"id": _ID, "name": (_is_text, "a text", None)},
    "annotations": {
        "id": _ID,
        "iscrowd": (lambda value: value in (0, 1), "0 or 1", 0),
        "ignore": (lambda value: value == 0, "0, as Detectron2 ignores no annotation", 0),
    },
}


class CocoFile:
    """A validated COCO annotation file.

    Attributes:
        errors: problems that stop training or silently make its result worse.
        warnings: unusual content that Detectron2 can handle.
        images: valid images.
        annotations: valid annotations.
        categories: valid categories, sorted by id as in Detectron2.
        class_names, category_ids: their names and ids. Ids may have gaps.
    """

    def __init__(
        self,
        json_file: str,
        image_root: str,
        needed: Sequence[str] = tuple(_LISTS),
        *,
        converted: Converted | None = None,
    ) -> None:
        """Reads and checks a file. Checks that image files exist, but does not open them.

        Args:
            json_file: path of the annotations, which is also used in messages.
            image_root: folder of the images.
            needed: lists that the file must have. Without "annotations", images need no size.
            converted: lists to check instead of the content of ``json_file``.

        Raises:
            UserError: the file is not in COCO's format.
        """
        self.json_file = json_file
        self.image_root = image_root
        converted = converted or Converted(_read(json_file, needed))
        self.errors, self.warnings = list(converted.errors), list(converted.warnings)
        self.annotations: list[Entry] = []
        self._lists, self._places = converted.lists, converted.places
        if not os.path.isdir(image_root):
            raise UserError(f"the image folder '{image_root}' of {json_file} does not exist")

        def find_file(entry: Entry) -> Found:
            if os.path.isfile(os.path.join(image_root, entry["file_name"])):
                return None
            name = short(entry["file_name"])
            where = f"in '{image_root}', which file_name must be relative to"
            return MISSING_IMAGE, f"there is no file {name} {where}"

        sizes = dict.fromkeys(("width", "height") if "annotations" in needed else (), _SIDE)
        self.images = self._validate("images", sizes | _RULES["images"], find_file)
        categories = self._validate("categories", _RULES["categories"])
        self.categories = sorted(categories, key=lambda entry: int(entry["id"]))
        self.class_names: tuple[str, ...] = tuple(entry["name"] for entry in self.categories)
        self.category_ids: tuple[int, ...] = tuple(entry["id"] for entry in self.categories)
        if len(set(self.class_names)) < len(self.categories):
            self.warnings.append(f"{json_file}: category names occur more than once")
        if "annotations" in needed:
            self._check_annotations()

    def _validate(
        self, key: str, rules: dict[str, Rule], find: Callable[[Entry], Found] = lambda entry: None
    ) -> list[Entry]:
        """Returns the valid entries of a list, and adds an error for each invalid one."""
        kind = _LISTS[key]
        valid: dict[int, Entry] = {}
        for number, entry in enumerate(self._lists[key], start=1):
            name, found = f"number {number}", _find_broken_rule(entry, kind, rules)
            if isinstance(entry, dict) and entry.get("id") is not None:
                name = f"id {short(entry['id'])}"
            if not found and entry["id"] in valid:
                found = f"{kind} id twice", "the id occurs more than once, here again"
            if found := found or find(entry):
                where = self._places.get((key, number)) or f"{self.json_file}: {kind} {name}"
                self.errors.append(DataError(found[0], where, found[1]))
            else:
                valid[entry["id"]] = entry
        return list(valid.values())

    def _check_annotations(self) -> None:
        """Keeps only valid annotations whose image and category are valid."""
        images, categories = {entry["id"]: entry for entry in self.images}, set(self.category_ids)
        known = {
            kind: {e["id"] for e in self._lists[key] if isinstance(e, dict) and _ID[0](e.get("id"))}
            for key, kind in _LISTS.items()
        }

        def find(entry: Entry) -> Found:
            for kind in ("image", "category"):
                id_ = entry.get(f"{kind}_id")
                if type(id_) is not int or id_ not in known[kind]:
                    must = f"an id in the list of {kind} entries"
                    return f"unknown {kind}", _must_be(entry, f"{kind}_id", must)
            image = images.get(entry["image_id"])
            return _find_shape_error(entry, image["width"], image["height"]) if image else None

        self.annotations = [
            entry
            for entry in self._validate("annotations", _RULES["annotations"], find)
            if entry["image_id"] in images and entry["category_id"] in categories
        ]
        boxes = [entry["bbox"] for entry in self.annotations]
        if boxes and max(map(max, boxes)) <= 1 and any(value % 1 for box in boxes for value in box):
            relative = "all boxes lie between 0 and 1; bbox must be in pixels, not relative"
            self.errors.append(DataError("relative boxes", self.json_file, relative))

        checks = {
            "have no polygon": has_polygon,
            "have a box without area": has_area,
            "reach beyond their image and are clipped": lambda entry: is_inside(
                entry["bbox"], images[entry["image_id"]]
            ),
        }
        for what, is_valid in checks.items():
            if odd := [entry["id"] for entry in self.annotations if not is_valid(entry)]:
                first = self._places.get(("annotations", odd[0])) or f"with id {odd[0]}"
                self.warnings.append(
                    f"{self.json_file}: {len(odd)} annotations {what}, the first {first}"
                )
        self._check_classes()

    def _check_classes(self) -> None:
        with_boxes = {
            entry["category_id"]
            for entry in self.annotations
            if not entry.get("iscrowd", 0) and has_area(entry) and has_polygon(entry)
        }
        if not with_boxes and not self.errors:
            reason = "there is no box to train on or to evaluate with"
            self.errors.append(DataError("no boxes", self.json_file, reason))
        without = [repr(e["name"]) for e in self.categories if e["id"] not in with_boxes]
        if without and with_boxes:
            names = join_first(without)
            self.warnings.append(f"{self.json_file}: categories without a box: {names}")

    def check(self) -> None:
        """Raises a ``UserError`` for the first error. If there is none, logs the warnings."""
        raise_first(self.errors)
        for warning in self.warnings:
            logger.warning(warning)

    def keep(self, file_names: Collection[str] | None = None) -> dict[str, list[Entry]]:
        """Returns COCO's lists of the valid entries, only of the images ``file_names`` if given."""
        images = [
            one for one in self.images if file_names is None or one["file_name"] in file_names
        ]
        ids = {image["id"] for image in images}
        annotations = [one for one in self.annotations if one["image_id"] in ids]
        return {"images": images, "annotations": annotations, "categories": self.categories}


def check_same_classes(train: CocoFile, val: CocoFile) -> None:
    """Raises a ``UserError`` if two annotation files have different classes or class orders."""
    if train.class_names == val.class_names:
        return
    files = f"'{train.json_file}' and '{val.json_file}'"
    for one, other in ((train, val), (val, train)):
        missing = [name for name in one.class_names if name not in other.class_names]
        if missing:
            lacks = f"'{other.json_file}' lacks {join_first(map(repr, missing))}"
            raise UserError(f"the categories of {files} differ: {lacks}")
    names, others = (join_first(map(repr, one.class_names)) for one in (train, val))
    raise UserError(
        f"the categories of {files} have the same names in a different order: {names} against "
        f"{others}"
    )


def has_area(entry: Entry) -> bool:
    """Returns whether the area of an annotation's box is positive."""
    return bool(entry["bbox"][2] > 0 and entry["bbox"][3] > 0)


def is_inside(box: Sequence[float], image: Entry) -> bool:
    """Returns whether a box (XYWH) lies in an image, up to the rounding of its sides."""
    x, y, width, height = box
    right, bottom = image["width"] + _MARGIN, image["height"] + _MARGIN
    return min(x, y) >= -_MARGIN and x + width <= right and y + height <= bottom


def has_polygon(entry: Entry) -> bool:
    """Returns False only if an annotation has polygons, but none has three or more points.

    Annotations with RLE and without a mask count as True.
    """
    segmentation = entry.get("segmentation")
    if not segmentation or isinstance(segmentation, dict):
        return True
    return any(len(polygon) >= 6 and len(polygon) % 2 == 0 for polygon in segmentation)


def _read(json_file: str, needed: Sequence[str]) -> dict[str, list[Any]]:
    """Returns the lists of a COCO file. Lists that are not needed are empty."""
    if not os.path.isfile(json_file):
        raise UserError(f"the annotation file '{json_file}' does not exist")
    try:
        with open(json_file, encoding="utf-8") as file:
            content = json.load(file)
    except (ValueError, RecursionError, OSError) as error:
        raise UserError(f"{json_file} cannot be read as JSON: {error}") from error
    lists: dict[str, list[Any]] = {key: [] for key in _LISTS}
    for key in needed:
        entries = content.get(key) if isinstance(content, dict) else None
        if not isinstance(entries, list) or not (entries or key == "annotations"):
            found = "empty" if entries == [] else "missing or no list"
            raise UserError(f"{json_file} is not in COCO's format: '{key}' is {found}")
        lists[key] = entries
    return lists


def _find_broken_rule(entry: object, kind: str, rules: dict[str, Rule]) -> Found:
    if not isinstance(entry, dict):
        return f"{kind} of a wrong type", f"it must be an object, but is {short(entry)}"
    for key, (is_valid, must, default) in rules.items():
        if not is_valid(entry.get(key, default)):
            return f"{kind} with a wrong {key}", _must_be(entry, key, must)
    return None


def _must_be(entry: Entry, key: str, must: str) -> str:
    found = f"is {short(entry[key])}" if key in entry else "is missing"
    return f"{key} must be {must}, but {found}"


def _find_shape_error(entry: Entry, width: int, height: int) -> Found:
    if not _can_be_drawn(entry.get("segmentation"), width, height):
        return (
            "segmentation that cannot be drawn",
            "segmentation must be a list of polygons of finite coordinates near the image, or RLE "
            "with counts for every pixel and size [height, width] of the image",
        )
    reason = find_box_error(entry.get("bbox"), (width, height))
    return ("wrong bbox", reason) if reason else None


def _can_be_drawn(segmentation: object, width: int, height: int) -> bool:
    if isinstance(segmentation, list):
        # Drawing coordinates far outside the image would need too much memory.
        return all(are_numbers(polygon, 11 * max(width, height)) for polygon in segmentation)
    if not isinstance(segmentation, dict) or not segmentation:
        return not segmentation
    runs: Any = segmentation.get("counts")
    runs = _decode_runs(runs) if isinstance(runs, str) else runs
    if not isinstance(runs, list) or not all(type(run) is int and run >= 0 for run in runs):
        return False
    return segmentation.get("size") == [height, width] and sum(runs) == width * height


def _decode_runs(counts: str) -> list[int] | None:
    """Returns the run lengths of a compressed RLE, or None if the string is invalid.

    pycocotools is not used because it reads out of bounds for some invalid strings.
    """
    runs: list[int] = []
    value = shift = 0
    for character in counts:
        code = ord(character) - 48
        if not 0 <= code < 64 or shift > _MAX_SHIFT:
            return None
        value |= (code & 0x1F) << shift
        shift += 5
        if not code & 0x20:
            if code & 0x10:  # two's complement
                value -= 1 << shift
            runs.append(value + runs[-2] if len(runs) > 2 else value)
            value = shift = 0
    return None if shift else runs
