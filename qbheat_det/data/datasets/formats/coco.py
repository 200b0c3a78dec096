# Copyright (c) qbheat_det contributors. Apache-2.0.
"""COCO's format: JSON files with the lists "images", "annotations" and "categories"."""

import os
from collections import Counter
from collections.abc import Mapping
from typing import Any, TypeGuard

import numpy as np

from qbheat_det.core.errors import UserError
from qbheat_det.data.checks import are_numbers, short
from qbheat_det.data.datasets.account import LeftOut
from qbheat_det.data.datasets.annotated import (
    NEGATIVE_IDS,
    check_keys,
    complete_keys,
    join_keys,
    select_annotated,
    set_annotated,
)
from qbheat_det.data.datasets.file_tree import FileTree
from qbheat_det.data.datasets.label_kinds import LabelKind, json_object
from qbheat_det.data.datasets.labelled_image import MARGIN, Box, LabelledImage
from qbheat_det.data.datasets.text_files import UnreadableFileError, read_json

from .base import Category, Format, Labels, LabelSet, find_by_kind, locate_image, note_encoding

Entry = dict[str, Any]

_MAX_ID = 2**53  # COCO evaluation stores ids as floats
_MAX_SHIFT = 30  # run lengths have at most seven groups of five bits
_MAX_COORDINATE = 1e9
_AGREEMENT = 0.9  # share of the boxes that must be corners by their area, to read all as such
_BEYOND = 0.1  # if a larger share of the boxes reach beyond their image, they may be corners


def read_coco(tree: FileTree, labels: LabelSet, part: str) -> Labels:
    """Reads the files of a part. Several files of different images are joined by class names.

    Files of captions or keypoints of the same images as "instances_*.json" are not used.

    Raises:
        UserError: a file is not in COCO's format, a category or the form of all boxes is wrong, or
            two files have the same image.
    """
    paths = sorted(labels.parts[part], key=lambda path: not _has_instances(path))
    files: list[_CocoFile] = []
    owners: dict[str, str] = {}  # maps images to the COCO file that has them
    for path in paths:
        file = _CocoFile(tree, path, part)
        shared = next((image.file for image in file.images if image.file in owners), None)
        if shared and _has_instances(owners[shared]) and not _has_instances(path):
            continue
        if shared:
            raise UserError(
                f"'{owners[shared]}' and '{path}' both have the image '{shared}': pass one of them "
                "with --data"
            )
        files.append(file)
        owners |= {image.file: path for image in file.images if image.file}
    # If all files are empty, they are kept, because their ``problem`` says so.
    files = [file for file in files if file.images] or files
    result = Labels(images=[], categories=files[0].categories)
    for file in files:
        result.files.append(file.path)
        result.images += file.images
        result.notes += file.notes
        result.problem = result.problem or file.problem
        result.left_out += file.left_out
    if len(files) == 1:
        result.is_original = True
        return result
    joined = ", ".join(f"'{path}'" for path in result.files)
    result.notes.append(f"these files are joined: {joined}")
    names = dict.fromkeys(str(entry["name"]) for file in files for entry in file.categories)
    result.categories = [{"id": id_, "name": name} for id_, name in enumerate(names, start=1)]
    id_of_name = {name: id_ for id_, name in enumerate(names, start=1)}
    for file in files:
        file.renumber_annotated(id_of_name)
    for image in result.images:
        image.id = None
        image.boxes = [box._replace(class_index=None) for box in image.boxes]
    return result


def _has_instances(path: str) -> bool:
    """Returns whether a file is named "instances…", so that it has boxes and no captions."""
    return os.path.basename(path).lower().startswith("instances")


class _CocoFile:
    """The content of one COCO file.

    Attributes:
        path: path of the file.
        categories: COCO's categories, sorted by id.
        images: images with their boxes, and images that cannot be used.
        left_out: annotations whose image is unknown.
        notes: what was assumed or replaced, one sentence each.
        problem: why the file has no labels; "" if it has some.
    """

    def __init__(self, tree: FileTree, path: str, part: str) -> None:
        self.path = path
        try:
            self.notes = note_encoding(path)
        except UnreadableFileError as error:
            raise UserError(f"'{path}': {error}") from error
        self.problem = ""
        self.left_out: list[LeftOut] = []
        content = _read_lists(path)
        self.categories = self._read_categories(content["categories"] or [])
        self._index_of_category = {
            category["id"]: index for index, category in enumerate(self.categories)
        }
        self.images: list[LabelledImage] = []
        self._image_of_id: dict[int | str, LabelledImage | None] = {}
        self._read_images(tree, content["images"], part)
        # Number of annotations by what is unusual about them. Their boxes are used.
        self._faults: Counter[str] = Counter()
        if not self.images:
            self.problem = f"'{path}' is not in COCO's format: 'images' is empty"
        elif content["annotations"] is None:
            self.problem = f"'{path}' is not in COCO's format: it has no list 'annotations'"
        elif content["categories"] is None:
            self.problem = f"'{path}' is not in COCO's format: it has no list 'categories'"
        else:
            self._read_annotations(content["annotations"])
        for fault, count in self._faults.items():
            self.notes.append(f"'{path}': {count:,} {fault}")

    def _read_categories(self, entries: list[Any]) -> list[Category]:
        """Returns the categories, sorted by id."""
        categories: dict[int, Category] = {}
        for number, entry in enumerate(entries, start=1):
            where = f"{self.path}: category number {number}"
            if not isinstance(entry, dict):
                raise UserError(f"{where}: it must be an object, but is {short(entry)}")
            id_ = _to_int(entry.get("id"))
            if type(id_) is not int or abs(id_) >= _MAX_ID:
                raise UserError(f"{where}: id must be a whole number below 2**53, not {short(id_)}")
            name = entry.get("name")
            if not isinstance(name, str) or not name.strip():
                raise UserError(f"{self.path}: category id {id_}: name must be a text")
            if id_ in categories:
                raise UserError(f"{self.path}: category id {id_} occurs twice")
            categories[id_] = {**entry, "id": id_}
        return [categories[id_] for id_ in sorted(categories)]

    def _read_images(self, tree: FileTree, entries: list[Any], part: str) -> None:
        """Fills ``images`` and ``_image_of_id``. An id of two different images maps to None."""
        for number, entry in enumerate(entries, start=1):
            image = self._read_image(entry, number)
            if image.exclusion:
                self.images.append(image)
                continue
            locate_image(tree, image, self.path, part)
            id_ = _to_int(entry["id"])
            is_new_id = id_ not in self._image_of_id
            first = self._image_of_id.setdefault(id_, image)
            if is_new_id:
                self.images.append(image)
                continue
            is_same_image = first is not None and bool(image.file) and image.file == first.file
            if first is not None and is_same_image:
                joined = join_keys(first.fields, image.fields)
                if joined != first.fields:
                    first.fields = joined
                    self.notes.append(f"{image.location}: lists of classes of two entries joined")
                continue
            self.images.append(image)
            self._image_of_id[id_] = None
            for same_id in (first, image):
                if same_id is not None and not same_id.exclusion:
                    same_id.leave_out("with the id of another", f"id {short(id_)} occurs twice")
        if any(NEGATIVE_IDS in image.fields for image in self.images):
            for image in self.images:
                image.fields = complete_keys(image.fields)
        if any(image.id is None for image in self.images if not image.exclusion):
            self.notes.append(f"'{self.path}' has ids of images that are no numbers: new ones")
        if any(isinstance(entry, dict) and "split" in entry for entry in entries):
            self.notes.append(f"'{self.path}': the field 'split' of images is not used")

    def _read_image(self, entry: Any, number: int) -> LabelledImage:
        """Returns the image of an entry. If the entry is invalid, its ``exclusion`` is set."""
        image = LabelledImage(f"{self.path}: image number {number}")
        if not isinstance(entry, dict):
            image.mark_missing(f"it must be an object, but is {short(entry)}")
            return image
        id_ = _to_int(entry.get("id"))
        is_number = type(id_) is int and abs(id_) < _MAX_ID
        if not is_number and not isinstance(id_, str):
            image.mark_missing(f"its id must be a number below 2**53, not {short(id_)}")
            return image
        image.location = f"{self.path}: image id {short(id_)}"
        name = entry.get("file_name")
        if name is None and isinstance(entry.get("coco_url"), str):  # LVIS
            name = "/".join(entry["coco_url"].split("/")[-2:])
        if not isinstance(name, str) or not name or "\0" in name:
            image.mark_missing(f"its file_name must be a file name, not {short(name)}")
            return image
        image.name = name
        if is_number:
            image.id = id_
        if self.categories:
            check_keys(entry, self._index_of_category, image.location)
        image.fields = entry
        width = entry.get("width")
        height = entry.get("height")
        if _is_side(width) and _is_side(height):
            image.size = (width, height)
        return image

    def renumber_annotated(self, id_of_name: Mapping[str, int]) -> None:
        """Replaces the ids of categories in the entries of images by those of joined files."""
        new_ids = {entry["id"]: id_of_name[str(entry["name"])] for entry in self.categories}
        every_id = frozenset(new_ids)
        for image in self.images:
            ids_of_boxes = {self.categories[box.class_index or 0]["id"] for box in image.boxes}
            ids = select_annotated(image.fields, ids_of_boxes, every_id)
            joined = id_of_name.values()
            if ids == every_id:  # as without keys
                image.fields = set_annotated(image.fields, joined, joined)
            else:
                renumbered = {new_ids[id_] for id_ in ids}
                image.fields = set_annotated(image.fields, renumbered, joined)

    def _find_image(self, id_: object) -> LabelledImage | None:
        """Returns the image with an id, or None if no image or several images have it."""
        if not isinstance(id_, int | str):
            return None
        return self._image_of_id.get(id_)

    def _read_annotations(self, entries: list[Any]) -> None:
        """Adds the boxes to their images. Invalid entries are left out."""
        are_corners = self._find_corners(entries)
        no_image = LabelledImage(self.path)  # collects the boxes whose image is unknown
        for number, entry in enumerate(entries, start=1):
            if isinstance(entry, dict):
                location = f"{self.path}: annotation id {short(entry.get('id'))}"
                image = self._find_image(_to_int(entry.get("image_id"))) or no_image
            else:
                location = f"{self.path}: annotation number {number}"
                image = no_image
            with image.skip_invalid_box(location):
                self._add_box(image, location, entry, are_corners=are_corners)
        for box in no_image.boxes:
            no_image.leave_out_box(box.location, "two images have its image_id")
        self.left_out = no_image.left_out_boxes

    def _add_box(
        self, image: LabelledImage, location: str, entry: Any, *, are_corners: bool
    ) -> None:
        """Adds the box of an annotation. Raises a ``ValueError`` if it is invalid."""
        if not isinstance(entry, dict):
            raise ValueError(f"it must be an object, but is {short(entry)}")
        image_id = _to_int(entry.get("image_id"))
        if not isinstance(image_id, int | str) or image_id not in self._image_of_id:
            raise ValueError(f"image_id {short(image_id)} must be an id in the list of images")
        category_id = _to_int(entry.get("category_id"))
        if type(category_id) is not int or category_id not in self._index_of_category:
            raise ValueError(
                f"category_id {short(category_id)} must be an id in the list of categories"
            )
        box = entry.get("bbox")
        if box is None and not are_corners:
            box = _enclose(entry.get("segmentation"))
        if not _is_box(box):
            raise ValueError(
                "bbox must be four finite numbers [x, y, width, height] in pixels, but is "
                f"{short(box)}"
            )
        x, y, width, height = box
        if are_corners:
            width -= x
            height -= y
        is_crowd = entry.get("iscrowd", 0) or entry.get("ignore", 0)
        if is_crowd not in (0, 1):
            raise ValueError(f"iscrowd and ignore must be 0 or 1, but are {short(is_crowd)}")
        if entry.get("ignore", 0):
            self._faults["annotations with 'ignore' are regions that training ignores"] += 1
        fields = entry
        segmentation = entry.get("segmentation")
        has_mask = bool(segmentation)
        if has_mask and not _can_be_drawn(segmentation, image.size):
            self._faults["masks cannot be drawn, only their boxes are used"] += 1
            has_mask = False
        if "segmentation" in entry and not has_mask:
            fields = {key: value for key, value in entry.items() if key != "segmentation"}
        index = self._index_of_category[category_id]
        name = str(self.categories[index]["name"])
        xywh = (x, y, width, height)
        image.boxes.append(
            Box(
                location=location,
                class_name=name,
                xywh=xywh,
                is_relative=False,
                is_crowd=bool(is_crowd),
                class_index=index,
                fields=fields,
            )
        )

    def _find_corners(self, entries: list[Any]) -> bool:
        """Returns whether the boxes are [x1, y1, x2, y2] instead of COCO's [x, y, width, height].

        This is the case if the field "area" of nearly all annotations is the area of the corners.

        Raises:
            UserError: the boxes are probably corners, but the areas do not prove it.
        """
        rows = []  # x, y, third and fourth number, width and height of the image, area
        for entry in entries:
            if not isinstance(entry, dict) or not _is_box(entry.get("bbox")):
                continue
            image = self._find_image(_to_int(entry.get("image_id")))
            size: tuple[float, float] = (np.inf, np.inf)
            if image and image.size:
                size = image.size
            area = entry.get("area")
            if type(area) not in (int, float) or isinstance(entry.get("segmentation"), dict):
                area = np.nan
            rows.append((*entry["bbox"], *size, area))
        if not rows:
            return False
        # One value per annotation (N,). An unknown image size is inf, and a missing area is nan.
        x, y, third, fourth, width, height, area = np.array(rows, dtype=np.float64).T
        area_of_sizes = third * fourth
        area_of_corners = (third - x) * (fourth - y)
        tolerance = 1 + 0.01 * np.abs(area)
        fits_as_sizes = np.abs(area_of_sizes - area) <= tolerance
        fits_as_corners = np.abs(area_of_corners - area) <= tolerance
        # Not the negation of ``fits_as_sizes``: both are False if the area is missing (nan).
        differs_as_sizes = np.abs(area_of_sizes - area) > tolerance
        fits_only_as_corners = fits_as_corners & differs_as_sizes
        are_valid_corners = (third > x) & (fourth > y)
        are_valid_corners &= (third <= width + MARGIN) & (fourth <= height + MARGIN)
        if fits_only_as_corners.mean() >= _AGREEMENT and are_valid_corners.mean() >= _AGREEMENT:
            note = "boxes are corners [x1, y1, x2, y2], as the areas show, and are read as such"
            self.notes.append(f"'{self.path}': {note}")
            return True
        are_beyond = (x + third > width + MARGIN) | (y + fourth > height + MARGIN)
        if are_beyond.mean() > _BEYOND and are_valid_corners.all() and not fits_as_sizes.any():
            raise UserError(
                f"'{self.path}': {are_beyond.sum():,} of {len(rows):,} boxes reach beyond their "
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
        may_be_missing = key != "images"
        if not isinstance(entries, list) and not (entries is None and may_be_missing):
            raise UserError(f"'{file}' is not in COCO's format: '{key}' is missing or no list")
        lists[key] = entries
    if lists["categories"] == [] and lists["annotations"] is not None:
        raise UserError(f"'{file}' is not in COCO's format: 'categories' is empty")
    return lists


def _to_int(value: object) -> Any:
    """Converts a float that is a whole number, such as 3.0, to an int.

    Returns any other value unchanged.
    """
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _is_side(value: object) -> TypeGuard[int]:
    """Returns whether a value can be the width or height of an image."""
    return type(value) is int and 0 < value < 2**31


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


def _can_be_drawn(segmentation: object, image_size: tuple[int, int] | None) -> bool:
    """Returns whether a mask is valid.

    A mask is a list of polygons, of which one at least must have three points, or run lengths (RLE)
    whose sum is the number of pixels.
    """
    if isinstance(segmentation, list):
        width, height = image_size or (2**15, 2**15)
        # Drawing coordinates far outside the image would need too much memory.
        if not all(are_numbers(polygon, 11 * max(width, height)) for polygon in segmentation):
            return False
        return any(len(polygon) >= 6 and len(polygon) % 2 == 0 for polygon in segmentation)
    if not isinstance(segmentation, dict) or image_size is None:
        return False
    width, height = image_size
    runs: Any = segmentation.get("counts")
    if isinstance(runs, str):
        runs = _decode_runs(runs)
    if not isinstance(runs, list) or not all(type(run) is int and run >= 0 for run in runs):
        return False
    return segmentation.get("size") == [height, width] and sum(runs) == width * height


def _decode_runs(counts: str) -> list[int] | None:
    """Returns the run lengths of a compressed RLE mask, or None if the string is invalid.

    Each character has six bits, from the code 48 on: five bits of a number, the lowest first, and a
    bit that is set if the number continues. From the fourth run on, a number is the difference to
    the run two before. pycocotools reads out of bounds for some invalid strings, so it is not used.
    """
    runs: list[int] = []
    value = 0
    shift = 0
    for character in counts:
        code = ord(character) - 48
        if not 0 <= code < 64 or shift > _MAX_SHIFT:
            return None
        value |= (code & 0x1F) << shift
        shift += 5
        if not code & 0x20:
            if code & 0x10:  # a negative number, in two's complement
                value -= 1 << shift
            if len(runs) > 2:
                value += runs[-2]
            runs.append(value)
            value = 0
            shift = 0
    if shift:  # the last number is incomplete
        return None
    return runs


COCO = Format(
    name="coco",
    title="COCO",
    kinds=(
        LabelKind(
            name="coco",
            suffixes=(".json",),
            matches=json_object(
                ("image_id", "bbox"),
                ("images", "annotations"),
                ("images", "categories"),
                ("annotations", "categories"),
                ("images", "file_name"),
            ),
        ),
    ),
    find=find_by_kind("coco"),
    read=read_coco,
    data="a JSON file, or a folder with JSON files, such as "
    "`annotations/instances_train2017.json`, `annotations/train.json` or "
    "`train/_annotations.coco.json`",
    images="below the folder, found by their names; or `--images DIR`",
    lists_classes=True,
)
