# Copyright (c) qbheat_det contributors. Apache-2.0.
"""CVAT's export "CVAT for images". Shapes become their bounding boxes; points have none.

Subsets of a project are parts of the data set, if they are named like parts.
"""

from collections.abc import Iterator
from typing import Any
from xml.etree.ElementTree import Element

from qbheat_det.core.errors import UserError
from qbheat_det.data.checks import short
from qbheat_det.data.datasets.file_tree import FileTree
from qbheat_det.data.datasets.label_kinds import LabelKind
from qbheat_det.data.datasets.labelled_image import (
    LabelledImage,
    NoBoxError,
    corners,
    enclose_ellipse,
    rotate_box,
)
from qbheat_det.data.datasets.layout import part_of_name
from qbheat_det.data.datasets.text_files import UnreadableFileError, parse_xml

from .base import Format, Labels, LabelSet, find_sets, locate_image

_EDGES = ("xtl", "ytl", "xbr", "ybr")


def find_cvat(tree: FileTree) -> list[LabelSet]:
    """Finds XML files with a list of images, and sorts their images by subset."""
    sets = []
    for one in find_sets(tree, tree.label_files.get("cvat", ())):
        parts: dict[str, Any] = {}
        for part, files in one.parts.items():
            for file in files:
                for subset in _list_subsets(file):
                    name = part_of_name(subset) or part
                    parts.setdefault(name, []).append((file, subset))
        sets.append(LabelSet(one.base, parts))
    return sets


def _list_subsets(file: str) -> list[str]:
    root = _parse(file)
    return list(dict.fromkeys(node.get("subset", "") for node in root.iter("image"))) or [""]


def _parse(file: str) -> Element:
    try:
        return parse_xml(file)
    except UnreadableFileError as error:
        raise UserError(f"'{file}': {error}") from error


def read_cvat(tree: FileTree, labels: LabelSet, part: str) -> Labels:
    """Reads the images of a part, see ``Format.read``."""
    result = Labels([], files=list(dict.fromkeys(file for file, _ in labels.parts[part])))
    for file, subset in labels.parts[part]:
        root = _parse(file)
        if root.find("track") is not None:
            raise UserError(
                f"'{file}' has tracks of a video: export 'CVAT for images' or COCO instead"
            )
        for image in _read_images(file, root, subset):
            locate_image(tree, image, file, part)
            result.images.append(image)
    return result


def _read_images(file: str, root: Element, subset: str) -> Iterator[LabelledImage]:
    for node in root.iter("image"):
        if node.get("subset", "") != subset:
            continue
        name = node.get("name", "")
        image = LabelledImage(f"{file}, image {short(name)}", name)
        if subset and not name.startswith(f"{subset}/"):
            image.name = f"{subset}/{name}"
        for number, shape in enumerate(node, start=1):
            with image.reading(f"{image.place}, shape {number}") as place:
                if shape.tag != "tag":  # a tag belongs to the whole image
                    image.add(place, shape.get("label"), _find_points(shape))
        yield image


def _find_points(shape: Element) -> list[tuple[float, float]]:
    turn = float(shape.get("rotation", "0"))
    if shape.tag == "box":
        left, top, right, bottom = (float(shape.get(key, "nan")) for key in _EDGES)
        centre = (left + right) / 2, (top + bottom) / 2
        return rotate_box(left, top, right, bottom, turn, centre)
    if shape.tag in ("polygon", "polyline"):
        pairs = (pair.split(",") for pair in shape.get("points", "").split(";"))
        return [(float(x), float(y)) for x, y in pairs]
    if shape.tag == "ellipse":
        x, y, rx, ry = (float(shape.get(key, "nan")) for key in ("cx", "cy", "rx", "ry"))
        return enclose_ellipse(x, y, rx, ry, turn)
    if shape.tag == "mask":
        sides = ("left", "top", "width", "height")
        return corners(*(float(shape.get(key, "nan")) for key in sides))
    raise NoBoxError(f"a shape '{shape.tag}' has no box")


CVAT = Format(
    "cvat",
    "CVAT",
    (LabelKind("cvat", (".xml",), lambda ends: "<annotations" in ends.start),),
    find_cvat,
    read_cvat,
    data='an export "CVAT for images"; the exports COCO, YOLO and Pascal VOC are in other rows',
    images="below the folder of the file, found by their names; or `--images DIR`",
)
