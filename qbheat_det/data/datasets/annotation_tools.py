# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Readers of annotation files: CSV, VIA, Label Studio, CVAT, and Hugging Face metadata."""

import cmath
import csv
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element

from qbheat_det.data.checks import short

from .conversion import LabelledImage, parse_xml, reading_record

# Known names of each CSV column, in lower case.
_COLUMNS = {
    "image": ("filename", "file_name", "imageid", "image_id", "image", "image_path", "path", "img"),
    "name": ("class", "label", "labelname", "class_name", "category", "name"),
    "xmin": ("xmin", "x_min", "x1", "left"),
    "ymin": ("ymin", "y_min", "y1", "top"),
    "xmax": ("xmax", "x_max", "x2", "right"),
    "ymax": ("ymax", "y_max", "y2", "bottom"),
}
_OPEN_IMAGES = "imageid"  # marks Open Images, whose boxes are fractions of the sides
_NAME_KEYS = ("label", "class", "name", "type", "category")
_CVAT_EDGES = ("xtl", "ytl", "xbr", "ybr")
# The keys of a Label Studio region. A region with only these keys was drawn without a label.
_SHAPE = {
    *("x", "y", "width", "height", "rotation", "points", "closed", "radiusX", "radiusY"),
    *("original_width", "original_height", "image_rotation"),
}

Points = list[tuple[float, float]]


def _corners(x: float, y: float, width: float, height: float) -> Points:
    return [(x, y), (x + width, y + height)]


def _around(x: float, y: float, rx: float, ry: float) -> Points:
    return [(x - rx, y - ry), (x + rx, y + ry)]


def _rotate(corners: Points, degrees: float, around: tuple[float, float]) -> Points:
    """Rotates the box between two corners clockwise around a point, and returns four points."""
    xs, ys = zip(*corners, strict=True)
    centre, turn = complex(*around), cmath.rect(1, math.radians(degrees))
    points = [complex(x, y) for x in xs for y in ys]
    rotated = [(point - centre) * turn + centre for point in points]
    return [(point.real, point.imag) for point in rotated]


def find_columns(header: Sequence[str]) -> dict[str, str] | None:
    """Maps the keys of ``_COLUMNS`` to the column names in a header; None if one is missing."""
    by_lower = {name.strip().strip('"').lower(): name for name in header}
    known = {key: [name for name in names if name in by_lower] for key, names in _COLUMNS.items()}
    if not all(known.values()):
        return None
    return {key: by_lower[names[0]] for key, names in known.items()}


def read_csv(file: Path) -> Iterator[LabelledImage]:
    """Reads a CSV file that has a header and one box per line.

    A line with only an image name is an image without boxes. In the format of Open Images
    ("ImageID, LabelName, XMin, …"), boxes are fractions of the image's sides.
    """
    images: dict[str, LabelledImage] = {}
    with file.open(encoding="utf-8-sig", errors="replace", newline="") as stream:
        rows = csv.DictReader(stream)
        columns = find_columns(rows.fieldnames or [])
        if columns is None:
            raise ValueError("its first line must have columns for image, class and box")
        is_relative = columns["image"].strip().lower() == _OPEN_IMAGES
        for row in rows:
            name, *values = ((row.get(columns[key]) or "").strip() for key in _COLUMNS)
            place = f"{file}, line {rows.line_num}"
            image = images.setdefault(name, LabelledImage(place, name))
            if any(values):
                with image.reading(place):
                    corners = values[1:3], values[3:]
                    image.add(place, values[0], corners, is_relative=is_relative, is_box=True)
    yield from images.values()


def read_via(file: Path) -> Iterator[LabelledImage]:
    """Reads a project or an annotation export of the VGG Image Annotator (VIA 2)."""
    content = json.loads(file.read_text(encoding="utf-8"))
    for key, entry in content.get("_via_img_metadata", content).items():
        with reading_record(f"{file}, image {short(key)}"):
            image = LabelledImage(f"{file}, image {short(entry['filename'])}", entry["filename"])
            regions = entry["regions"]
            regions = list(regions.values() if isinstance(regions, dict) else regions)
        for number, region in enumerate(regions, start=1):
            with image.reading(place := f"{image.place}, region {number}"):
                shape = region["shape_attributes"]
                name = _choose_name(region.get("region_attributes") or {})
                image.add(place, name, _via_points(shape), is_box=shape.get("name") == "rect")
        yield image


def _via_points(shape: Mapping[str, Any]) -> Points:
    kind = shape.get("name")
    if kind == "rect":
        return _corners(*(shape[key] for key in ("x", "y", "width", "height")))
    if kind in ("polygon", "polyline"):
        return list(zip(shape["all_points_x"], shape["all_points_y"], strict=True))
    if kind in ("circle", "ellipse"):
        radii = (shape.get(key, shape.get("r")) for key in ("rx", "ry"))
        return _around(shape["cx"], shape["cy"], *radii)
    raise ValueError(f"a shape {kind!r} has no box")


def _choose_name(attributes: Mapping[str, Any]) -> object:
    """Returns the class in a region's attributes, which is a text or the checked option."""
    keys = [key for key in _NAME_KEYS if key in attributes] or list(attributes)
    for key in keys:
        value = attributes[key]
        if isinstance(value, dict):
            value = next((name for name, is_set in value.items() if is_set), None)
        if value not in (None, ""):
            return value
    return None


def read_label_studio(file: Path) -> Iterator[LabelledImage]:
    """Reads Label Studio's JSON or JSON-MIN export.

    Images of tasks without a finished annotation get ``is_skipped=True``, and are left out later.
    """
    for number, task in enumerate(json.loads(file.read_text(encoding="utf-8")), start=1):
        with reading_record(f"{file}, task {number}"):
            image, results = _read_task(file, number, task)
        for index, result in enumerate(results, start=1):
            with image.reading(place := f"{image.place}, region {index}"):
                _add_result(image, place, result)
        yield image


def _read_task(
    file: Path, number: int, task: Mapping[str, Any]
) -> tuple[LabelledImage, Sequence[Any]]:
    """Returns the image of a task and its list of regions."""
    if not isinstance(task, dict):
        raise ValueError(f"it must be a JSON object, but is {short(task)}")
    data = task.get("data", task)
    texts = [value for value in data.values() if isinstance(value, str)]
    named = [data[key] for key in ("image", "img", "ocr") if key in data]
    if not (found := [*named, *texts]):
        raise ValueError("it names no image")
    image = LabelledImage(f"{file}, task {task.get('id', number)}", str(found[0]))
    attempts = task.get("annotations", task.get("completions"))
    if attempts is None:  # JSON-MIN
        return image, list(task.get("label") or [])
    done = [one for one in attempts if not one.get("was_cancelled")]
    image.is_skipped, image.num_unread = not done, max(0, len(done) - 1)
    return image, list(done[-1]["result"] if done else [])


def _add_result(image: LabelledImage, place: str, result: Mapping[str, Any]) -> None:
    """Adds a region, whose coordinates are percentages of the image's sides, to an image."""
    value = result.get("value", result)
    kind = next((key for key in value if key.endswith("labels")), None)
    if kind is None and value and value.keys() <= _SHAPE:
        raise ValueError("it has no class")
    if kind is None or kind in ("labels", "choices"):  # not about a region
        return

    def fractions(*keys: str) -> list[float]:
        return [value[key] / 100 for key in keys]

    if "points" in value and kind != "brushlabels":
        points = [(x / 100, y / 100) for x, y in value["points"]]
    elif kind == "ellipselabels":
        points = _around(*fractions("x", "y", "radiusX", "radiusY"))
    elif kind == "rectanglelabels":
        points = _corners(*fractions("x", "y", "width", "height"))
        # The box is rotated around its top left corner, in pixel coordinates.
        source = {**result, **value}
        wide, high = (source.get(f"original_{side}", 1) for side in ("width", "height"))
        pixels = [(x * wide, y * high) for x, y in points]
        pixels = _rotate(pixels, value.get("rotation", 0), pixels[0])
        points = [(x / wide, y / high) for x, y in pixels]
    else:
        raise ValueError(f"regions of the kind '{kind}' have no box")
    image.add(place, next(iter(value[kind]), None), points, is_relative=True)


def read_cvat(file: Path) -> Iterator[LabelledImage]:
    """Reads CVAT's export "CVAT for images". Masks and points are errors, as they have no box."""
    tree = parse_xml(file)
    if tree.find("track") is not None:
        raise ValueError("it has tracks of a video: export 'CVAT for images' or COCO")
    for node in tree.iter("image"):
        name = node.get("name", "")
        image = LabelledImage(f"{file}, image {short(name)}", name)
        for number, shape in enumerate(node, start=1):
            with image.reading(place := f"{image.place}, shape {number}"):
                if shape.tag != "tag":  # a tag belongs to the whole image
                    image.add(place, shape.get("label"), _cvat_points(shape))
        yield image


def _cvat_points(shape: Element) -> Points:
    if shape.tag == "box":
        left, top, right, bottom = (float(shape.get(key, "nan")) for key in _CVAT_EDGES)
        middle = (left + right) / 2, (top + bottom) / 2
        return _rotate([(left, top), (right, bottom)], float(shape.get("rotation", "0")), middle)
    if shape.tag in ("polygon", "polyline"):
        pairs = (pair.split(",") for pair in shape.get("points", "").split(";"))
        return [(float(x), float(y)) for x, y in pairs]
    if shape.tag == "ellipse":
        return _around(*(float(shape.get(key, "nan")) for key in ("cx", "cy", "rx", "ry")))
    raise ValueError(f"a shape '{shape.tag}' has no box")


def read_hugging_face(file: Path) -> Iterator[LabelledImage]:
    """Reads ``metadata.jsonl`` or ``metadata.csv`` of a Hugging Face image folder.

    A row has "file_name", and "objects" with "bbox" and "categories". A bbox is [x, y, width,
    height] in pixels, as in the object detection guide of Hugging Face.
    """
    with file.open(encoding="utf-8-sig", newline="") as stream:
        if file.suffix.lower() == ".csv":
            rows: list[Any] = list(csv.DictReader(stream))
        else:
            rows = [json.loads(line) for line in stream if line.strip()]
    for number, row in enumerate(rows, start=1):
        with reading_record(f"{file}, entry {number}"):
            image = LabelledImage(f"{file}, entry {number}", row["file_name"])
            objects = row.get("objects") or {}
            objects = json.loads(objects) if isinstance(objects, str) else objects
            if isinstance(objects, dict):
                keys = (*_NAME_KEYS, "categories", "labels")
                names: list[Any] = next((objects[key] for key in keys if key in objects), [])
                pairs = zip(objects.get("bbox", []), names, strict=True)
                objects = [{"bbox": box, "category": name} for box, name in pairs]
        for index, thing in enumerate(objects, start=1):
            with image.reading(place := f"{image.place}, object {index}"):
                x, y, width, height = map(float, thing["bbox"])
                corners = _corners(x, y, width, height)
                image.add(place, _choose_name(thing), corners, is_box=True)
        yield image
