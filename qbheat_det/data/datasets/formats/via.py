# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The format of the VGG Image Annotator (VIA 2). Shapes become their bounding boxes."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from qbheat_det.core.errors import UserError
from qbheat_det.core.text import join_first
from qbheat_det.data.checks import short
from qbheat_det.data.datasets.file_tree import FileTree
from qbheat_det.data.datasets.label_kinds import Ends, LabelKind, starts_with
from qbheat_det.data.datasets.labelled_image import (
    Box,
    LabelledImage,
    NoBoxError,
    corners,
    enclose_ellipse,
)
from qbheat_det.data.datasets.text_files import read_json, read_table

from .base import (
    NAME_KEYS,
    ONLY_CLASS,
    Format,
    Labels,
    LabelSet,
    choose_option,
    find_by_kind,
    read_with,
)

_NO_CLASS = "\0"  # marks a missing class until all regions are read

ImageEntry = tuple[str, Any, list[Any] | None]
"""Location of an image's entry for messages, the image's file name, and its regions.

The regions are None if the entry is invalid.
"""


def read_via(tree: FileTree, labels: LabelSet, part: str) -> Labels:
    """Reads the files of a part. If no region has a class, all get the class "object"."""
    result = _read(tree, labels, part)
    boxes = [box for image in result.images for box in image.boxes]
    if boxes and not any(map(_has_class, boxes)):
        result.notes.append(f"no region of VIA has a class: all get the class '{ONLY_CLASS}'")
        for image in result.images:
            image.boxes = [box._replace(class_name=ONLY_CLASS) for box in image.boxes]
        return result
    for image in result.images:
        for box in image.boxes:
            if not _has_class(box):
                image.leave_out_box(box.location, "it has no class")
        image.boxes = [box for box in image.boxes if _has_class(box)]
    return result


def _has_class(box: Box) -> bool:
    return bool(box.class_name.strip(_NO_CLASS))


def read_file(file: str) -> Iterator[LabelledImage]:
    """Reads a project or an export as JSON or CSV. Yields the images with their boxes.

    A region without a class gets the class ``_NO_CLASS``.
    """
    if file.lower().endswith(".csv"):
        entries = list(_read_table(file))
    else:
        entries = list(_read_project(file))
    all_regions = [region for _, _, regions in entries for region in regions or ()]
    class_key = _find_class_attribute(file, all_regions)
    for location_of_image, name, regions in entries:
        image = LabelledImage(location_of_image, name)
        if regions is None:
            image.mark_missing("it has no list 'regions'")
        for number, region in enumerate(regions or (), start=1):
            with image.skip_invalid_box(f"{image.location}, region {number}") as location:
                shape = region["shape_attributes"]
                class_name = choose_option(_list_values(region).get(class_key)) or _NO_CLASS
                is_box = shape.get("name") == "rect"
                image.add_box(location, class_name, find_box_points(shape), is_box=is_box)
        yield image


def _list_values(region: Any) -> dict[str, object]:
    """Maps the names of a region's attributes, in lower case, to their values, if not blank."""
    attributes = region.get("region_attributes") if isinstance(region, dict) else None
    if not isinstance(attributes, dict):
        return {}
    values = {key.strip().lower(): value for key, value in attributes.items()}
    return {key: value for key, value in values.items() if choose_option(value) is not None}


def _find_class_attribute(file: str, regions: Sequence[Any]) -> str:
    """Returns the attribute that has the classes: one of ``NAME_KEYS``, or the only one.

    Checkboxes count only if there is nothing else. Raises a ``UserError`` if there are several
    attributes, and none has a name such as "class".
    """
    is_checkbox: dict[str, bool] = {}
    for region in regions:
        for key, value in _list_values(region).items():
            is_checkbox[key] = isinstance(value, dict)
    for key in NAME_KEYS:
        if key in is_checkbox:
            return key
    keys = [key for key in is_checkbox if not is_checkbox[key]] or list(is_checkbox)
    if len(keys) > 1:
        raise UserError(
            f"'{file}': one of the attributes {join_first(keys)} must have the name 'class', "
            "to tell which has the classes"
        )
    if not keys:
        return ""
    return keys[0]


def _read_project(file: str) -> Iterator[ImageEntry]:
    """Yields the images of a project or of an export as JSON."""
    content = read_json(file)
    for key, entry in content.get("_via_img_metadata", content).items():
        regions = entry.get("regions") if isinstance(entry, dict) else None
        if isinstance(regions, dict):
            regions = list(regions.values())
        if not isinstance(regions, list):
            yield f"{file}, image {short(key)}", "", None
            continue
        name = entry.get("filename")
        yield f"{file}, image {short(name)}", name, regions


def _read_table(file: str) -> Iterator[ImageEntry]:
    """Yields the images of an export as CSV, which has one region per row."""
    regions_of: dict[str, list[Any]] = {}
    for row in read_table(file):
        regions = regions_of.setdefault(row["filename"], [])
        shape = json.loads(row["region_shape_attributes"] or "{}")
        if shape:
            attributes = json.loads(row["region_attributes"] or "{}")
            regions.append({"shape_attributes": shape, "region_attributes": attributes})
    for name, regions in regions_of.items():
        yield f"{file}, image {short(name)}", name, regions


def find_box_points(shape: Mapping[str, Any]) -> list[tuple[float, float]]:
    """Returns points (x, y) in pixels that have the same bounding box as a shape.

    These are the vertices of a polygon, or the top left and the bottom right corner of a rectangle
    or of the box around an ellipse. Raises a ``NoBoxError`` for a point.
    """
    kind = shape.get("name")
    if kind == "rect":
        return corners(*(float(shape[key]) for key in ("x", "y", "width", "height")))
    if kind in ("polygon", "polyline"):
        return list(zip(shape["all_points_x"], shape["all_points_y"], strict=True))
    if kind == "circle":
        return enclose_ellipse(shape["cx"], shape["cy"], shape["r"], shape["r"])
    if kind == "ellipse":
        degrees = math.degrees(shape.get("theta") or 0)
        return enclose_ellipse(shape["cx"], shape["cy"], shape["rx"], shape["ry"], degrees)
    raise NoBoxError(f"a shape {kind!r} has no box")


_read = read_with(read_file, "VGG Image Annotator")


def _is_via(ends: Ends) -> bool:
    if not ends.start.lstrip().startswith("{"):
        return False
    return '"_via_' in ends.both or ends.have_keys([("regions", "filename")])


VIA = Format(
    name="via",
    title="VGG Image Annotator",
    kinds=(
        LabelKind(name="via", suffixes=(".json",), matches=_is_via),
        LabelKind(
            name="via table",
            suffixes=(".csv",),
            matches=starts_with("filename", "region_shape_attributes"),
        ),
    ),
    find=find_by_kind("via", "via table"),
    read=read_via,
    data="a project, or an export of annotations as JSON or CSV",
    images="below the folder of the file, found by their names; or `--images DIR`",
)
