# Copyright (c) qbheat_det contributors. Apache-2.0.
"""CVAT's export "CVAT for images". Shapes become their bounding boxes; points have none.

Subsets of a project are parts of the data set, if they are named like parts.
"""

from collections.abc import Iterator
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


def find_cvat(tree: FileTree) -> list[LabelSet]:
    """Finds XML files with a list of images, and sorts their images by subset."""
    sets = []
    for label_set in find_sets(tree, tree.label_files.get("cvat", ())):
        parts: dict[str, list[tuple[str, str]]] = {}
        for part, files in label_set.parts.items():
            for file in files:
                images = _parse(file).iter("image")
                subsets = dict.fromkeys(image.get("subset", "") for image in images)
                for subset in subsets or [""]:
                    part_of_subset = part_of_name(subset) or part
                    parts.setdefault(part_of_subset, []).append((file, subset))
        sets.append(LabelSet(label_set.base, parts))
    return sets


def _parse(file: str) -> Element:
    """Returns the root of an XML file. Raises a ``UserError`` if it cannot be read."""
    try:
        return parse_xml(file)
    except UnreadableFileError as error:
        raise UserError(f"'{file}': {error}") from error


def read_cvat(tree: FileTree, labels: LabelSet, part: str) -> Labels:
    """Reads the images of a part of a data set, and finds their files."""
    result = Labels(images=[], files=list(dict.fromkeys(file for file, _ in labels.parts[part])))
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
    """Yields the images of a subset with their boxes. ``subset`` "" is for images of no subset."""
    for node in root.iter("image"):
        if node.get("subset", "") != subset:
            continue
        name = node.get("name", "")
        image = LabelledImage(f"{file}, image {short(name)}", name)
        if subset and not name.startswith(f"{subset}/"):
            image.name = f"{subset}/{name}"
        for number, shape in enumerate(node, start=1):
            with image.skip_invalid_box(f"{image.location}, shape {number}") as location:
                if shape.tag != "tag":  # a tag belongs to the whole image
                    image.add_box(location, shape.get("label"), find_box_points(shape))
        yield image


def find_box_points(shape: Element) -> list[tuple[float, float]]:
    """Returns points (x, y) in pixels that have the same bounding box as a shape.

    These are the vertices of a polygon, the four corners of a rotated box, or the top left and the
    bottom right corner of the box around an ellipse or mask. Raises a ``NoBoxError`` for points and
    other shapes without a box.
    """

    def numbers(*keys: str) -> list[float]:
        return [float(shape.get(key, "nan")) for key in keys]

    degrees = float(shape.get("rotation", "0"))
    if shape.tag == "box":
        left, top, right, bottom = numbers("xtl", "ytl", "xbr", "ybr")
        centre = ((left + right) / 2, (top + bottom) / 2)
        return rotate_box(left, top, right, bottom, degrees, centre)
    if shape.tag in ("polygon", "polyline"):
        pairs = [pair.split(",") for pair in shape.get("points", "").split(";")]
        return [(float(x), float(y)) for x, y in pairs]
    if shape.tag == "ellipse":
        x, y, rx, ry = numbers("cx", "cy", "rx", "ry")
        return enclose_ellipse(x, y, rx, ry, degrees)
    if shape.tag == "mask":
        return corners(*numbers("left", "top", "width", "height"))
    raise NoBoxError(f"a shape '{shape.tag}' has no box")


CVAT = Format(
    name="cvat",
    title="CVAT",
    kinds=(
        LabelKind(
            name="cvat", suffixes=(".xml",), matches=lambda ends: "<annotations" in ends.start
        ),
    ),
    find=find_cvat,
    read=read_cvat,
    data='an export "CVAT for images"; exports as COCO, YOLO and Pascal VOC have these formats',
    images="below the folder of the file, found by their names; or `--images DIR`",
)
