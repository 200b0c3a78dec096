# Copyright (c) qbheat_det contributors. Apache-2.0.
"""COCO's format: JSON files with the lists "images", "annotations" and "categories"."""

import os
from collections import Counter
from collections.abc import Sequence
from typing import Any, TypeGuard

import numpy as np

from qbheat_det.core.errors import UserError
from qbheat_det.data.checks import are_numbers, short
from qbheat_det.data.datasets.account import LeftOut
from qbheat_det.data.datasets.file_tree import FileTree
from qbheat_det.data.datasets.label_kinds import LabelKind, json_object
from qbheat_det.data.datasets.labelled_image import MARGIN, Box, LabelledImage
from qbheat_det.data.datasets.text_files import UnreadableFileError, read_json

from .base import Category, Format, Labels, LabelSet, find_by_kind, locate_image, note_encoding

Entry = dict[str, Any]

_LARGEST_ID = 2**53  # COCO evaluation stores ids as floats
_MAX_SHIFT = 30  # run lengths have at most seven groups of five bits
_MAX_COORDINATE = 1e9
_AGREEMENT = 0.9  # share of boxes that must show that all are corners
_BEYOND = 0.1  # share of boxes beyond their image that makes corners likely


def read_coco(tree: FileTree, labels: LabelSet, part: str) -> Labels:
    """Reads the files of a part. Several files of different images are joined by class names.

    Files of captions or keypoints of the same images as "instances_*.json" are not used.

    Raises:
        UserError: a file is not in COCO's format, a category or the form of all boxes is wrong, or
            two files have the same image.
    """
    files = sorted(labels.parts[part], key=lambda path: not _has_instances(path))
    result = Labels([])
    readings: list[_Reading] = []
    owners: dict[str, str] = {}
    for file in files:
        one = _Reading(tree, file, part)
        shared = next((image.file for image in one.images if image.file in owners), None)
        if shared and _has_instances(owners[shared]) and not _has_instances(file):
            continue
        if shared:
            raise UserError(
                f"'{owners[shared]}' and '{file}' both have the image '{shared}': pass one of them "
                "with --data"
            )
        readings.append(one)
        owners |= {image.file: file for image in one.images if image.file}
    readings = [one for one in readings if one.images] or readings
    for one in readings:
        result.files.append(one.file)
        result.notes += one.notes
        result.problem = result.problem or one.problem
        result.left_out += one.left_out
    result.images = [image for one in readings for image in one.images]
    result.categories = _join_categories([one.categories for one in readings])
    result.is_original = len(readings) == 1
    if len(readings) > 1:
        joined = ", ".join(f"'{file}'" for file in result.files)
        result.notes.append(f"these files are joined: {joined}")
        for image in result.images:
            image.id = None
            image.boxes = [box._replace(category=None) for box in image.boxes]
    return result


def _has_instances(path: str) -> bool:
    """Returns whether a file has boxes by its name, and not captions or keypoints."""
    return os.path.basename(path).lower().startswith("instances")


def _join_categories(lists: Sequence[list[Category]]) -> list[Category]:
    """Returns the categories of several files, with new ids if there is more than one file."""
    if len(lists) == 1:
        return lists[0]
    names = dict.fromkeys(str(one["name"]) for categories in lists for one in categories)
    return [{"id": number, "name": name} for number, name in enumerate(names, start=1)]


class _Reading:
    """The content of one COCO file."""

    def __init__(self, tree: FileTree, file: str, part: str) -> None:
        self.file = file
        try:
            self.notes = note_encoding(file)
        except UnreadableFileError as error:
            raise UserError(f"'{file}': {error}") from error
        self.problem = ""
        self.left_out: list[LeftOut] = []
        content = _read_lists(file)
        self.categories = self._read_categories(content["categories"])
        self.images: list[LabelledImage] = []
        self._dropped: Counter[str] = Counter()
        by_id = self._read_images(tree, content["images"], part)
        if not self.images:
            self.problem = f"'{file}' is not in COCO's format: 'images' is empty"
        elif content["annotations"] is None:
            self.problem = f"'{file}' is not in COCO's format: it has no list 'annotations'"
        elif content["categories"] is None:
            self.problem = f"'{file}' is not in COCO's format: it has no list 'categories'"
        else:
            self._read_annotations(content["annotations"], by_id)
        for what, count in self._dropped.items():
            self.notes.append(f"'{file}': {count:,} {what}")

    def _read_categories(self, entries: list[Any] | None) -> list[Category]:
        valid: dict[int, Category] = {}
        for number, entry in enumerate(entries or (), start=1):
            where = f"{self.file}: category number {number}"
            if not isinstance(entry, dict):
                raise UserError(f"{where}: it must be an object, but is {short(entry)}")
            id_, name = _whole(entry.get("id")), entry.get("name")
            if type(id_) is not int or not _is_id(id_):
                raise UserError(f"{where}: id must be a whole number below 2**53, not {short(id_)}")
            if not isinstance(name, str) or not name.strip():
                raise UserError(f"{self.file}: category id {id_}: name must be a text")
            if id_ in valid:
                raise UserError(f"{self.file}: category id {id_} occurs twice")
            valid[id_] = {**entry, "id": id_}
        return [valid[id_] for id_ in sorted(valid)]

    def _read_images(
        self, tree: FileTree, entries: list[Any], part: str
    ) -> dict[Any, LabelledImage | None]:
        """Reads the images, and returns them by id. Ids that two images have map to None."""
        by_id: dict[Any, LabelledImage | None] = {}
        for number, entry in enumerate(entries, start=1):
            image = self._read_image(entry, number)
            self.images.append(image)
            if image.reason:
                continue
            locate_image(tree, image, self.file, part)
            id_ = _whole(entry["id"])
            other = by_id.setdefault(id_, image)
            if other is image:
                continue
            if other is not None and image.file and image.file == other.file:
                self.images.pop()  # the same entry again
                continue
            by_id[id_] = None
            for one in (other, image):
                if one is not None and not one.reason:
                    one.leave_out("with the id of another", f"id {short(id_)} occurs twice")
        if any(image.id is None for image in self.images if not image.reason):
            self.notes.append(f"'{self.file}' has ids of images that are no numbers: new ones")
        if any(isinstance(entry, dict) and "split" in entry for entry in entries):
            self.notes.append(f"'{self.file}': the field 'split' of images is not used")
        return by_id

    def _read_image(self, entry: Any, number: int) -> LabelledImage:
        image = LabelledImage(f"{self.file}: image number {number}")
        if not isinstance(entry, dict):
            image.miss(f"it must be an object, but is {short(entry)}")
            return image
        id_, name = _whole(entry.get("id")), entry.get("file_name")
        if name is None and isinstance(entry.get("coco_url"), str):  # LVIS
            name = "/".join(entry["coco_url"].split("/")[-2:])
        if isinstance(id_, bool) or not isinstance(id_, int | str) or not _is_id(id_, texts=True):
            image.miss(f"its id must be a number below 2**53, not {short(id_)}")
            return image
        image.place = f"{self.file}: image id {short(id_)}"
        if not isinstance(name, str) or not name or "\0" in name:
            image.miss(f"its file_name must be a file name, not {short(name)}")
            return image
        image.name = name
        image.id = id_ if isinstance(id_, int) else None
        image.fields = entry
        sides = entry.get("width"), entry.get("height")
        if all(type(side) is int and 0 < side < 2**31 for side in sides):
            image.size = sides  # type: ignore[assignment]
        return image

    def _read_annotations(self, entries: list[Any], by_id: dict[Any, LabelledImage | None]) -> None:
        indices = {one["id"]: index for index, one in enumerate(self.categories)}
        are_corners = self._find_corners(entries, by_id)
        others = LabelledImage(self.file)  # collects what belongs to no image
        for number, entry in enumerate(entries, start=1):
            image = others
            place = f"{self.file}: annotation number {number}"
            if isinstance(entry, dict):
                place = f"{self.file}: annotation id {short(entry.get('id'))}"
                key = _whole(entry.get("image_id"))
                known = by_id.get(key) if isinstance(key, int | str) else None
                image = known or others
            with image.reading(place):
                self._add(image, place, entry, indices, are_corners=are_corners, by_id=by_id)
        for box in others.boxes:
            others.leave_out_box(box.place, "two images have its image_id")
        self.left_out = others.left_out

    def _add(
        self,
        image: LabelledImage,
        place: str,
        entry: Any,
        indices: dict[int, int],
        *,
        are_corners: bool,
        by_id: dict[Any, LabelledImage | None],
    ) -> None:
        """Adds the box of an annotation. Raises a ``ValueError`` if it is invalid."""
        if not isinstance(entry, dict):
            raise ValueError(f"it must be an object, but is {short(entry)}")
        image_id, category_id = _whole(entry.get("image_id")), _whole(entry.get("category_id"))
        if not isinstance(image_id, int | str) or image_id not in by_id:
            reason = "must be an id in the list of images"
            raise ValueError(f"image_id {short(image_id)} {reason}")
        if type(category_id) is not int or category_id not in indices:
            must = "must be an id in the list of categories"
            raise ValueError(f"category_id {short(category_id)} {must}")
        box = entry.get("bbox")
        if box is None and not are_corners:
            box = _enclose(entry.get("segmentation"))
        if not _is_box(box):
            must = "must be four finite numbers [x, y, width, height] in pixels"
            raise ValueError(f"bbox {must}, but is {short(box)}")
        x, y, width, height = box
        if are_corners:
            width, height = width - x, height - y
        is_crowd = entry.get("iscrowd", 0) or entry.get("ignore", 0)
        if is_crowd not in (0, 1):
            raise ValueError(f"iscrowd and ignore must be 0 or 1, but are {short(is_crowd)}")
        if entry.get("ignore", 0):
            self._dropped["annotations with 'ignore' are regions that training ignores"] += 1
        fields = entry
        if "segmentation" in entry and not self._has_mask(entry["segmentation"], image):
            fields = {key: value for key, value in entry.items() if key != "segmentation"}
        index = indices[category_id]
        name = str(self.categories[index]["name"])
        xywh = (x, y, width, height)
        image.boxes.append(Box(place, name, xywh, False, bool(is_crowd), index, fields))

    def _has_mask(self, segmentation: object, image: LabelledImage) -> bool:
        """Returns whether a segmentation can be drawn, and counts those that cannot."""
        if not segmentation:
            return False
        if _can_be_drawn(segmentation, image.size) and _has_polygon(segmentation):
            return True
        self._dropped["masks cannot be drawn, only their boxes are used"] += 1
        return False

    def _find_corners(self, entries: list[Any], by_id: dict[Any, LabelledImage | None]) -> bool:
        """Returns whether boxes are given by two corners instead of a corner and a size.

        Raises a ``UserError`` if this is likely, but the areas in the file do not show it.
        """
        rows = []
        for entry in entries:
            box = entry.get("bbox") if isinstance(entry, dict) else None
            if not _is_box(box):
                continue
            key = _whole(entry.get("image_id"))
            image = by_id.get(key) if isinstance(key, int | str) else None
            size = image.size if image and image.size else (np.inf, np.inf)
            area = entry.get("area")
            is_area = type(area) in (int, float) and not isinstance(entry.get("segmentation"), dict)
            rows.append((*box, *size, area if is_area else np.nan))
        if not rows:
            return False
        x, y, third, fourth, width, height, area = np.array(rows, dtype=np.float64).T
        as_sizes, as_corners = third * fourth, (third - x) * (fourth - y)
        near = 1 + 0.01 * np.abs(area)
        is_shown = (np.abs(as_corners - area) <= near) & (np.abs(as_sizes - area) > near)
        is_valid = (third > x) & (fourth > y)
        is_valid &= (third <= width + MARGIN) & (fourth <= height + MARGIN)
        if is_shown.mean() >= _AGREEMENT and is_valid.mean() >= _AGREEMENT:
            note = "boxes are corners [x1, y1, x2, y2], as the areas show, and are read as such"
            self.notes.append(f"'{self.file}': {note}")
            return True
        is_beyond = (x + third > width + MARGIN) | (y + fourth > height + MARGIN)
        fits_area = np.abs(as_sizes - area) <= near
        if is_beyond.mean() > _BEYOND and is_valid.all() and not fits_area.any():
            raise UserError(
                f"'{self.file}': {is_beyond.sum():,} of {len(rows):,} boxes reach beyond their "
                "image, and all fit as corners: bbox must be [x, y, width, height], not "
                "[x1, y1, x2, y2]"
            )
        return False


def _read_lists(file: str) -> dict[str, Any]:
    """Returns the lists of a COCO file. "annotations" and "categories" are None if missing."""
    try:
        content = read_json(file)
    except UnreadableFileError as error:
        raise UserError(f"'{file}': {error}") from error
    lists: dict[str, Any] = {}
    for key in ("images", "annotations", "categories"):
        entries = content.get(key) if isinstance(content, dict) else None
        is_list = isinstance(entries, list)
        if (key == "images" and not is_list) or not (is_list or entries is None):
            raise UserError(f"'{file}' is not in COCO's format: '{key}' is missing or no list")
        lists[key] = entries
    if lists["categories"] == [] and lists["annotations"] is not None:
        raise UserError(f"'{file}' is not in COCO's format: 'categories' is empty")
    return lists


def _whole(value: object) -> Any:
    """Returns a whole number as an int, such as 3.0, and any other value as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _is_id(value: object, *, texts: bool = False) -> bool:
    if type(value) is int:
        return abs(value) < _LARGEST_ID
    return texts and isinstance(value, str)


def _enclose(segmentation: object) -> list[float] | None:
    """Returns the box around the polygons of a mask, or None if there are none."""
    if not isinstance(segmentation, list) or not segmentation:
        return None
    if not all(are_numbers(polygon, _MAX_COORDINATE) for polygon in segmentation):
        return None
    xs = [x for polygon in segmentation for x in polygon[::2]]
    ys = [y for polygon in segmentation for y in polygon[1::2]]
    if not xs or len(xs) != len(ys):
        return None
    return [min(xs), min(ys), max(xs) - min(xs), max(ys) - min(ys)]


def _is_box(box: object) -> TypeGuard[list[float]]:
    """Returns whether a value is a list of four finite numbers."""
    if not isinstance(box, list) or len(box) != 4:
        return False
    return are_numbers(box, _MAX_COORDINATE) and bool not in map(type, box)


def _has_polygon(segmentation: object) -> bool:
    """Returns False if a segmentation has polygons, but none has three or more points."""
    if not isinstance(segmentation, list):
        return True
    return any(len(polygon) >= 6 and len(polygon) % 2 == 0 for polygon in segmentation)


def _can_be_drawn(segmentation: object, size: tuple[int, int] | None) -> bool:
    """Returns whether a mask has valid polygons near the image, or RLE for every pixel."""
    width, height = size or (2**15, 2**15)
    if isinstance(segmentation, list):
        # Drawing coordinates far outside the image would need too much memory.
        return all(are_numbers(polygon, 11 * max(width, height)) for polygon in segmentation)
    if not isinstance(segmentation, dict) or size is None:
        return False
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


COCO = Format(
    "coco",
    "COCO",
    (
        LabelKind(
            "coco",
            (".json",),
            json_object(
                ("image_id", "bbox"),
                ("images", "annotations"),
                ("images", "categories"),
                ("annotations", "categories"),
                ("images", "file_name"),
            ),
        ),
    ),
    find_by_kind("coco"),
    read_coco,
    data="a JSON file, or a folder with JSON files, such as "
    "`annotations/instances_train2017.json`, `annotations/train.json` or "
    "`train/_annotations.coco.json`",
    images="below the folder, found by their names; or `--images DIR`",
    lists_classes=True,
)
