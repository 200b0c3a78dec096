# Copyright (c) qbheat_det contributors. Apache-2.0.
"""LabelMe's format: a JSON file per image, beside the image. Shapes become their bounding boxes."""

import math
from collections.abc import Mapping
from typing import Any

from qbheat_det.data.checks import short
from qbheat_det.data.datasets.label_kinds import LabelKind, json_object
from qbheat_det.data.datasets.labelled_image import LabelledImage, NoBoxError, enclose_ellipse
from qbheat_det.data.datasets.text_files import UnreadableFileError, read_json

from .base import Format, find_per_image, read_per_image


def parse(file: str) -> dict[str, Any]:
    """Returns the content of a file. Raises an ``UnreadableFileError`` if it has no shapes."""
    content = read_json(file)
    if not isinstance(content, dict) or not isinstance(content.get("shapes"), list):
        raise UnreadableFileError("it is not a file of LabelMe: it has no list 'shapes'")
    return content


def add_shapes(image: LabelledImage, content: Mapping[str, Any]) -> None:
    """Adds the shapes in the content of a file to an image."""
    for number, shape in enumerate(content["shapes"], start=1):
        with image.skip_invalid_box(f"{image.label_file}, shape {number}") as location:
            image.add_box(location, shape.get("label"), find_box_points(shape))


def read_name(content: Mapping[str, Any]) -> str:
    """Returns the file name of the image without its folders, or "" if it is missing."""
    path = content.get("imagePath")
    if not isinstance(path, str):
        return ""
    return path.replace("\\", "/").rpartition("/")[2]


def find_box_points(shape: Mapping[str, Any]) -> list[tuple[float, float]]:
    """Returns points (x, y) in pixels that have the same bounding box as a shape.

    These are two corners of the square around a circle, and the shape's own points for all other
    shapes. Raises a ``NoBoxError`` for a point or a line.
    """
    kind = shape.get("shape_type", "polygon")
    points = [(float(x), float(y)) for x, y in shape["points"]]
    if kind == "circle":  # its centre, and a point on it
        centre, edge = points
        radius = math.dist(centre, edge)
        return enclose_ellipse(*centre, radius, radius)
    min_points = {"rectangle": 2, "polygon": 3, "linestrip": 2, "rotation": 4, "mask": 2}
    if kind not in min_points:
        raise NoBoxError(f"a shape {short(kind)} has no box")
    if len(points) < min_points[kind]:
        raise ValueError(f"a shape {short(kind)} needs more than {len(points)} points")
    return points


LABELME = Format(
    name="labelme",
    title="LabelMe",
    kinds=(
        LabelKind(
            name="labelme",
            suffixes=(".json",),
            matches=json_object(("shapes", "imagePath"), ("shapes", "version")),
            has_one_image=True,
        ),
    ),
    find=find_per_image("labelme"),
    read=read_per_image(parse, add_shapes, read_name),
    data="a folder with a JSON file for each image",
    images="beside the JSON files, or below the folder",
)
