# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Readers of files that annotation tools export: CSV, VIA, Label Studio, CVAT, Hugging Face."""

import contextlib
import csv
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree.ElementTree import Element

from qbheat_det.core.errors import UserError
from qbheat_det.core.text import one_line
from qbheat_det.data.checks import DataError, short

from .voc import parse_xml

# Column names by their meaning, in lower case.
_COLUMNS = {
    "image": ("filename", "file_name", "imageid", "image_id", "image", "image_path", "path", "img"),
    "name": ("class", "label", "labelname", "class_name", "category", "name"),
    "xmin": ("xmin", "x_min", "x1", "left"),
    "ymin": ("ymin", "y_min", "y1", "top"),
    "xmax": ("xmax", "x_max", "x2", "right"),
    "ymax": ("ymax", "y_max", "y2", "bottom"),
}
_OPEN_IMAGES = "imageid"  # its boxes are fractions of the image's sides
_BROKEN = (KeyError, IndexError, TypeError, ValueError, AttributeError)
_NAME_KEYS = ("label", "class", "name", "type", "category")


class Box(NamedTuple):
    """A box with its class; ``xywh`` in pixels, or in fractions of the image's sides."""

    place: str
    name: str
    xywh: Sequence[float]
    is_relative: bool = False
    is_crowd: bool = False


@dataclass
class LabelledImage:
    """An image of a label file.

    Attributes:
        place: file and entry, for messages.
        name: name, path or URL of the image in the file.
        boxes: its objects; empty for an image without objects.
        errors: entries that are invalid.
        is_skipped: whether nobody has labelled the image.
    """

    place: str
    name: str
    boxes: list[Box] = field(default_factory=list)
    errors: list[DataError] = field(default_factory=list)
    is_skipped: bool = False

    @contextlib.contextmanager
    def reading(self, place: str) -> Iterator[None]:
        """Turns an exception about the content of an object into an error of the image."""
        try:
            yield
        except _BROKEN as error:
            self.errors.append(DataError("wrong object", place, _describe(error)))

    def add(
        self,
        place: str,
        name: object,
        points: object,
        *,
        is_relative: bool = False,
        is_box: bool = False,
    ) -> None:
        """Adds the enclosing box of points (n, 2), or an error if they are invalid.

        With ``is_box``, the points are the top left and the bottom right corner.
        """
        try:
            pairs = [(float(x), float(y)) for x, y in points]  # type: ignore[attr-defined]
            xs, ys = zip(*pairs, strict=True)
            if not all(map(math.isfinite, (*xs, *ys))):
                raise ValueError
            is_ordered = not is_box or (xs[0] < xs[-1] and ys[0] < ys[-1])
        except (TypeError, ValueError):
            reason = f"its coordinates must be numbers, but are {short(points)}"
            self.errors.append(DataError("wrong object", place, reason))
            return
        if not is_ordered:
            reason = f"its right or bottom edge is before the left or top one: {short(points)}"
            self.errors.append(DataError("wrong object", place, reason))
            return
        if name in (None, ""):
            self.errors.append(DataError("wrong object", place, "it has no class"))
            return
        box = (min(xs), min(ys), max(xs) - min(xs), max(ys) - min(ys))
        self.boxes.append(Box(place, str(name), box, is_relative))


@contextlib.contextmanager
def reading_record(place: str) -> Iterator[None]:
    """Turns an exception about the content of a record into a ``UserError`` that names it."""
    try:
        yield
    except _BROKEN as error:
        raise UserError(f"{place}: {_describe(error)}") from error


def _describe(error: Exception) -> str:
    is_missing = isinstance(error, KeyError)
    return f"it has no {error}" if is_missing else f"{type(error).__name__}: {one_line(error)}"


def rotate(x: float, y: float, width: float, height: float, degrees: float,
           around: tuple[float, float]) -> list[tuple[float, float]]:  # fmt: skip
    """Returns the corners of a box after a clockwise rotation around a point."""
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    corners = ((x, y), (x + width, y), (x + width, y + height), (x, y + height))
    shifts = [(px - around[0], py - around[1]) for px, py in corners]
    return [(around[0] + dx * cos - dy * sin, around[1] + dx * sin + dy * cos) for dx, dy in shifts]


def _find_columns(header: Sequence[str]) -> dict[str, str] | None:
    """Returns the header's name of each column, or None if one is missing."""
    by_lower = {name.strip().strip('"').lower(): name for name in header}
    found = {key: next((by_lower[n] for n in names if n in by_lower), None)
             for key, names in _COLUMNS.items()}  # fmt: skip
    return None if None in found.values() else found  # type: ignore[return-value]


def are_columns(line: str) -> bool:
    """Whether the first line of a CSV names the columns of image, class and box."""
    return _find_columns(next(csv.reader([line]), [])) is not None


def read_csv(file: Path) -> Iterator[LabelledImage]:
    """Reads one box per line, with a header; a line with a name alone is an image without boxes.

    Open Images' "ImageID, LabelName, XMin, …" has fractions of the image's sides.
    """
    images: dict[str, LabelledImage] = {}
    with file.open(encoding="utf-8-sig", errors="replace", newline="") as stream:
        rows = csv.DictReader(stream)
        columns = _find_columns(rows.fieldnames or [])
        if columns is None:
            raise ValueError("its first line must name the columns of image, class and box")
        is_relative = columns["image"].strip().lower() == _OPEN_IMAGES
        for row in rows:
            values = {key: (row.get(column) or "").strip() for key, column in columns.items()}
            place = f"{file}, line {rows.line_num}"
            name = values["image"]
            image = images.setdefault(name, LabelledImage(place, name))
            if any(values[key] for key in ("name", "xmin", "ymin", "xmax", "ymax")):
                corners = [(values[f"x{end}"], values[f"y{end}"]) for end in ("min", "max")]
                image.add(place, values["name"], corners, is_relative=is_relative, is_box=True)
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


def _via_points(shape: Mapping[str, Any]) -> object:
    kind = shape.get("name")
    if kind == "rect":
        x, y, width, height = (shape[key] for key in ("x", "y", "width", "height"))
        return [(x, y), (x + width, y + height)]
    if kind in ("polygon", "polyline"):
        return list(zip(shape["all_points_x"], shape["all_points_y"], strict=True))
    if kind in ("circle", "ellipse"):
        rx, ry = (shape.get(key, shape.get("r")) for key in ("rx", "ry"))
        cx, cy = shape["cx"], shape["cy"]
        return [(cx - rx, cy - ry), (cx + rx, cy + ry)]
    return f"a shape {kind!r}"


def _choose_name(attributes: Mapping[str, Any]) -> object:
    """Returns the class in the attributes of a region: text, or the box that is ticked."""
    keys = [key for key in _NAME_KEYS if key in attributes] or list(attributes)
    for key in keys:
        value = attributes[key]
        if isinstance(value, dict):
            value = next((name for name, is_set in value.items() if is_set), None)
        if value not in (None, ""):
            return value
    return None


def read_label_studio(file: Path) -> Iterator[LabelledImage]:
    """Reads Label Studio's exports JSON and JSON-MIN; tasks that are skipped have no labels."""
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
    """Returns the image of a task, and its regions."""
    data = task.get("data", task)
    texts = [value for value in data.values() if isinstance(value, str)]
    named = [data[key] for key in ("image", "img", "ocr") if key in data]
    if not (found := [*named, *texts]):
        raise ValueError("it names no image")
    image = LabelledImage(f"{file}, task {task.get('id', number)}", str(found[0]))
    done = [one for one in task.get("annotations", task.get("completions", []))
            if not one.get("was_cancelled")]  # fmt: skip
    is_min = "annotations" not in task and "completions" not in task
    image.is_skipped = not (done or is_min)
    if is_min:
        return image, list(task.get("label") or [])
    return image, list(done[-1]["result"] if done else [])


def _add_result(image: LabelledImage, place: str, result: Mapping[str, Any]) -> None:
    """Adds a region; its coordinates are percentages of the image's sides."""
    value = result.get("value", result)
    kind = next((key for key in value if key.endswith("labels")), None)
    if kind is None or kind in ("labels", "choices"):  # not about a region
        return
    name = next(iter(value[kind]), None)
    if "points" in value and kind != "brushlabels":
        points = [(x / 100, y / 100) for x, y in value["points"]]
    elif kind == "ellipselabels":
        x, y, rx, ry = (value[key] / 100 for key in ("x", "y", "radiusX", "radiusY"))
        points = [(x - rx, y - ry), (x + rx, y + ry)]
    elif kind == "rectanglelabels":
        x, y, width, height = (value[key] / 100 for key in ("x", "y", "width", "height"))
        # A rotation is around the top left corner, in pixels.
        source = {**result, **value}
        sides = [source.get(f"original_{side}", 1) for side in ("width", "height")]
        left, top = x * sides[0], y * sides[1]
        corners = rotate(left, top, width * sides[0], height * sides[1],
                         value.get("rotation", 0), (left, top))  # fmt: skip
        points = [(px / sides[0], py / sides[1]) for px, py in corners]
    else:
        reason = f"regions of the kind '{kind}' have no box"
        image.errors.append(DataError("wrong object", place, reason))
        return
    image.add(place, name, points, is_relative=True)


def read_cvat(file: Path) -> Iterator[LabelledImage]:
    """Reads CVAT's export "CVAT for images"; masks and points have no box."""
    tree = parse_xml(file)
    if isinstance(tree, DataError):
        raise UserError(tree.message)
    if tree.find("track") is not None:
        raise UserError(f"'{file}' has tracks of a video: export 'CVAT for images' or COCO")
    for node in tree.iter("image"):
        name = node.get("name", "")
        image = LabelledImage(f"{file}, image {short(name)}", name)
        for number, shape in enumerate(node, start=1):
            with image.reading(place := f"{image.place}, shape {number}"):
                _add_shape(image, place, shape)
        yield image


def _add_shape(image: LabelledImage, place: str, shape: Element) -> None:
    label = shape.get("label")
    if shape.tag == "box":
        x, y, right, bottom = (float(shape.get(k, "nan")) for k in _CVAT_EDGES)
        middle, degrees = ((x + right) / 2, (y + bottom) / 2), float(shape.get("rotation", "0"))
        image.add(place, label, rotate(x, y, right - x, bottom - y, degrees, middle))
    elif shape.tag in ("polygon", "polyline"):
        pairs = shape.get("points", "").split(";")
        image.add(place, label, [pair.split(",") for pair in pairs])
    elif shape.tag == "ellipse":
        cx, cy, rx, ry = (float(shape.get(k, "nan")) for k in ("cx", "cy", "rx", "ry"))
        image.add(place, label, [(cx - rx, cy - ry), (cx + rx, cy + ry)])
    elif shape.tag != "tag":
        image.errors.append(DataError("wrong object", place, f"a shape '{shape.tag}' has no box"))


_CVAT_EDGES = ("xtl", "ytl", "xbr", "ybr")


def read_hugging_face(file: Path) -> Iterator[LabelledImage]:
    """Reads metadata.jsonl or metadata.csv: "file_name", "objects" with "bbox" and "categories".

    A bbox is [x, y, width, height] in pixels, as in the library's guide to object detection.
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
                corners = [(x, y), (x + width, y + height)]
                image.add(place, _choose_name(thing), corners, is_box=True)
        yield image
