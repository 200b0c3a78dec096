# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Supervisely's format: ``ann/a.jpg.json`` beside ``img/a.jpg``, in one folder per data set."""

import base64
import struct
import zlib
from collections.abc import Mapping
from typing import Any

from qbheat_det.data.checks import short
from qbheat_det.data.datasets.file_tree import FileTree
from qbheat_det.data.datasets.label_kinds import LabelKind, json_object
from qbheat_det.data.datasets.labelled_image import LabelledImage, NoBoxError, corners
from qbheat_det.data.datasets.layout import group_per_image_files, sort_into_parts
from qbheat_det.data.datasets.text_files import UnreadableFileError, read_json

from .base import Format, LabelSet, read_per_image

_PNG_HEADER_SIZE = 64  # bytes, which include the size of the image


def find_supervisely(tree: FileTree) -> list[LabelSet]:
    """Finds JSON files of Supervisely. The data sets of a project (``meta.json``) are joined."""
    files = tree.label_files.get("supervisely", ())
    manifests = tree.label_files.get("supervisely meta", [])
    groups = group_per_image_files(tree, files)
    if len(manifests) == 1 and len(groups) > 1:  # folders of one project
        groups = {(): [path for group in groups.values() for path in group]}
    return [
        LabelSet(base, sort_into_parts(tree, group, base, by_folder=True), manifests)
        for base, group in groups.items()
    ]


def parse(file: str) -> dict[str, Any]:
    """Returns the content of a file. Raises an ``UnreadableFileError`` if it has no objects."""
    content = read_json(file)
    if not isinstance(content, dict) or not isinstance(content.get("objects"), list):
        raise UnreadableFileError("it is not a file of Supervisely: it has no list 'objects'")
    return content


def add_objects(image: LabelledImage, content: Mapping[str, Any]) -> None:
    """Adds the objects in the content of a file to an image."""
    for number, entry in enumerate(content["objects"], start=1):
        with image.skip_invalid_box(f"{image.label_file}, object {number}") as location:
            image.add_box(location, entry["classTitle"], find_box_points(entry))


def find_box_points(entry: Mapping[str, Any]) -> list[tuple[float, float]]:
    """Returns points (x, y) in pixels that have the same bounding box as an object.

    These are the corners of a rectangle or mask, or the vertices of a polygon or line. Raises a
    ``NoBoxError`` for points and other geometries without a box.
    """
    kind = entry.get("geometryType")
    if kind == "bitmap":
        x, y = map(float, entry["bitmap"]["origin"])
        width, height = _read_mask_size(entry["bitmap"]["data"])
        return corners(x, y, width, height)
    if kind not in ("rectangle", "polygon", "line"):
        raise NoBoxError(f"a geometry {short(kind)} has no box")
    return [(float(x), float(y)) for x, y in entry["points"]["exterior"]]


def _read_mask_size(data: str) -> tuple[int, int]:
    """Returns (width, height) of a mask, which is a PNG file compressed by zlib, in base64."""
    # Only the header is unpacked.
    try:
        head = zlib.decompressobj().decompress(base64.b64decode(data), _PNG_HEADER_SIZE)
        width, height = struct.unpack(">II", head[16:24])
    except (zlib.error, struct.error) as error:
        raise ValueError(f"its bitmap is damaged ({error})") from error
    return width, height


SUPERVISELY = Format(
    name="supervisely",
    title="Supervisely",
    kinds=(
        LabelKind(
            name="supervisely",
            suffixes=(".json",),
            matches=json_object(("classTitle",), ("objects", "size", "tags")),
            has_one_image=True,
        ),
        LabelKind(
            name="supervisely meta",
            suffixes=(".json",),
            matches=json_object(("classes", "shape", "title"), ("classes", "tags", "projectType")),
        ),
    ),
    find=find_supervisely,
    read=read_per_image(parse, add_objects),
    data="a project, or a folder with `ann/` and `img/`",
    images="`img/`",
)
