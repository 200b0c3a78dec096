# Copyright (c) qbheat_det contributors. Apache-2.0.
"""LabelMe's format: a JSON file per image, beside the image. Shapes become their bounding boxes."""

import math
from collections.abc import Mapping
from typing import Any

from qbheat_det.data.checks import short
from qbheat_det.data.datasets.account import LeftOut
from qbheat_det.data.datasets.file_tree import FileTree
from qbheat_det.data.datasets.label_kinds import LabelKind, json_object
from qbheat_det.data.datasets.labelled_image import LabelledImage
from qbheat_det.data.datasets.layout import pair
from qbheat_det.data.datasets.text_files import UnreadableFileError, read_json

from .base import Format, Labels, LabelSet, add_unpaired, find_per_image
from .voc import find_by_name


def read_labelme(tree: FileTree, labels: LabelSet, part: str) -> Labels:
    """Reads the JSON files of a part, see ``Format.read``."""
    result = Labels([])
    contents: dict[str, dict[str, Any]] = {}
    for file in labels.parts[part]:
        try:
            content = read_json(file)
            if not isinstance(content, dict) or not isinstance(content.get("shapes"), list):
                raise UnreadableFileError("it is not a file of LabelMe: it has no list 'shapes'")
            contents[file] = content
        except UnreadableFileError as error:
            image = LabelledImage(file, label_file=file)
            image.reason = LeftOut("that cannot be read", file, str(error), "label file")
            result.images.append(image)
    names = {file: _read_name(content) for file, content in contents.items()}
    pairs = pair(tree, list(contents), names)
    find_by_name(tree, pairs, names, part, result)
    for file, path in pairs.image_of.items():
        image = LabelledImage(file, file=path, label_file=file)
        result.images.append(image)
        for number, shape in enumerate(contents[file]["shapes"], start=1):
            with image.reading(place := f"{file}, shape {number}"):
                points = find_points(shape)
                image.add(place, shape.get("label"), points)
    add_unpaired(result, pairs)
    return result


def _read_name(content: Mapping[str, Any]) -> str:
    name = content.get("imagePath")
    return name.replace("\\", "/").rpartition("/")[2] if isinstance(name, str) else ""


def find_points(shape: Mapping[str, Any]) -> list[tuple[float, float]]:
    """Returns points around a shape. Raises a ``ValueError`` for a point, a line or a mask."""
    kind = shape.get("shape_type", "polygon")
    points = [(float(x), float(y)) for x, y in shape["points"]]
    if kind == "circle":  # its centre, and a point on it
        (x, y), edge = points
        radius = math.dist((x, y), edge)
        return [(x - radius, y - radius), (x + radius, y + radius)]
    smallest = {"rectangle": 2, "polygon": 3, "linestrip": 2, "rotation": 4, "mask": 2}
    if kind not in smallest or len(points) < smallest[kind]:
        raise ValueError(f"a shape {short(kind)} of {len(points)} points has no box")
    return points


LABELME = Format(
    "labelme",
    "LabelMe",
    (
        LabelKind(
            "labelme",
            (".json",),
            json_object(("shapes", "imagePath"), ("shapes", "version")),
            has_one_image=True,
        ),
    ),
    find_per_image("labelme"),
    read_labelme,
    data="a folder with a JSON file for each image",
    images="beside the JSON files, or below the folder",
)
