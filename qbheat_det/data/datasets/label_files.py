# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Reads files with the boxes of many images: CSV and exports of Label Studio.

``READERS`` lists a reader for each kind of file. ``convert_labels`` finds the image files, and
returns COCO's ``images``, ``annotations`` and ``categories`` lists. Polygons, ellipses and rotated
boxes are replaced by their bounding boxes.
"""

import cmath
import csv
import json
import math
import os
import re
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from qbheat_det.core.errors import UserError
from qbheat_det.core.text import join_first, one_line
from qbheat_det.data.checks import DataError, raise_first, short

from .conversion import MISSING_IMAGE, Converted, LabelledImage, convert, reading_record
from .image_folder import PART_NAMES, list_images

_LARGEST = 500_000_000  # largest size of a label file in bytes
_HEAD = 4096  # bytes by which a label file is recognized
_UPLOADED = re.compile(r"^[0-9a-f]{8}-")  # Label Studio adds this prefix to uploaded files
# Known names of each CSV column, in lower case.
_COLUMNS = {
    "image": ("filename", "file_name", "image_id", "image", "image_path", "path", "img"),
    "name": ("class", "label", "class_name", "category", "name"),
    "xmin": ("xmin", "x_min", "x1", "left"),
    "ymin": ("ymin", "y_min", "y1", "top"),
    "xmax": ("xmax", "x_max", "x2", "right"),
    "ymax": ("ymax", "y_max", "y2", "bottom"),
}
# The keys of a Label Studio region. A region with only these keys was drawn without a label.
_SHAPE = {
    *("x", "y", "width", "height", "rotation", "points", "closed", "radiusX", "radiusY"),
    *("original_width", "original_height", "image_rotation"),
}


def _find_columns(header: Sequence[str]) -> dict[str, str] | None:
    """Maps the keys of ``_COLUMNS`` to the column names in a header; None if one is missing."""
    by_lower = {name.strip().strip('"').lower(): name for name in header}
    known = {key: [name for name in names if name in by_lower] for key, names in _COLUMNS.items()}
    if not all(known.values()):
        return None
    return {key: by_lower[names[0]] for key, names in known.items()}


def read_csv(file: Path) -> Iterator[LabelledImage]:
    """Reads a CSV file that has a header and one box per line.

    A line with only an image name is an image without boxes.
    """
    images: dict[str, LabelledImage] = {}
    with file.open(encoding="utf-8-sig", errors="replace", newline="") as stream:
        rows = csv.DictReader(stream)
        columns = _find_columns(rows.fieldnames or [])
        if columns is None:
            raise ValueError("its first line must have columns for image, class and box")
        for row in rows:
            name, *values = ((row.get(columns[key]) or "").strip() for key in _COLUMNS)
            place = f"{file}, line {rows.line_num}"
            image = images.setdefault(name, LabelledImage(place, name))
            if any(values):
                with image.reading(place):
                    image.add(place, values[0], (values[1:3], values[3:]), is_box=True)
    yield from images.values()


def read_label_studio(file: Path) -> Iterator[LabelledImage]:
    """Reads Label Studio's JSON or JSON-MIN export. Skipped tasks are images without labels."""
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
    image.is_skipped = not done
    return image, list(done[-1]["result"] if done else [])


def _add_result(image: LabelledImage, place: str, result: Mapping[str, Any]) -> None:
    """Adds a region, whose coordinates are percentages of the image's sides, to an image."""
    value = result.get("value", result)
    kind = next((key for key in value if key.endswith("labels")), None)
    if kind is None and value and value.keys() <= _SHAPE:
        raise ValueError("it has no class")
    if kind is None or kind in ("labels", "choices"):  # not about a region
        return

    if "points" in value and kind != "brushlabels":
        points = [(x / 100, y / 100) for x, y in value["points"]]
    elif kind == "ellipselabels":
        x, y, rx, ry = (value[key] / 100 for key in ("x", "y", "radiusX", "radiusY"))
        points = [(x - rx, y - ry), (x + rx, y + ry)]
    elif kind == "rectanglelabels":
        # The box is rotated around its top left corner, in pixel coordinates.
        source = {**result, **value}
        wide, high = (source.get(f"original_{side}", 1) for side in ("width", "height"))
        x, y, width, height = (value[key] / 100 for key in ("x", "y", "width", "height"))
        turn = cmath.rect(1, math.radians(value.get("rotation", 0)))
        width, height = width * wide, height * high
        sides = [complex(i, j) * turn for i in (0, width) for j in (0, height)]
        points = [(x + side.real / wide, y + side.imag / high) for side in sides]
    else:
        raise ValueError(f"regions of the kind '{kind}' have no box")
    image.add(place, next(iter(value[kind]), None), points, is_relative=True)


# Title and reader of label files by suffix.
READERS: dict[str, tuple[str, Callable[[Path], Iterator[LabelledImage]]]] = {
    ".csv": ("CSV", read_csv),
    ".json": ("Label Studio", read_label_studio),
}


def find_label_files(path: Path) -> dict[str, Path]:
    """Maps "train" and "val", or "all", to label files. Empty if there are none."""
    if path.is_file():
        return {"all": path} if _is_label_file(path) else {}
    if not path.is_dir():
        return {}
    parts = {}
    for part, names in PART_NAMES.items():
        for name in names:
            tables = sorted(path.glob(f"{name}*.csv"))
            found = tables[0] if len(tables) == 1 else _find_in(path / name)
            if found and part not in parts:
                parts[part] = found
    if "train" in parts:
        return parts
    return {"all": found} if (found := _find_in(path)) else {}


def _find_in(folder: Path) -> Path | None:
    """Returns the only label file of a folder."""
    if not folder.is_dir():
        return None
    found = [file for file in sorted(folder.iterdir()) if _is_label_file(file)]
    named = [file for file in found if file.name.startswith("_annotations.")]
    return chosen[0] if len(chosen := named or found) == 1 else None


def _is_label_file(file: Path) -> bool:
    """Returns whether the suffix and the first bytes are those of a label file."""
    suffix = file.suffix.lower()
    if suffix not in READERS:
        return False
    try:
        with file.open("rb") as stream:
            head = stream.read(_HEAD).decode("utf-8", errors="replace").lstrip("\ufeff \n\r\t")
    except OSError:
        return False
    if suffix == ".json":  # a list of tasks; COCO is an object
        return head.startswith("[")
    return _find_columns(next(csv.reader([head.partition("\n")[0]]), [])) is not None


def read_labels(file: Path) -> Iterator[LabelledImage]:
    """Yields the images of a label file.

    Raises:
        UserError: the file cannot be read, or its content does not match its suffix.
    """
    title, read = READERS[file.suffix.lower()]
    try:
        if file.stat().st_size > _LARGEST:
            raise UserError(f"'{file}' is too large for a file of labels")
        yield from read(file)
    except (OSError, KeyError, TypeError, ValueError, AttributeError, csv.Error) as error:
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise UserError(f"'{file}' is not a file of {title} ({reason})") from error


def convert_labels(source: Mapping[str, Any]) -> Converted:
    """Converts a subset to COCO's format, with file names relative to the image folder.

    ``source`` has the keys "labels_path" (a label file or a folder with label files) and "subset"
    (a key of ``find_label_files``). Optional keys are "image_root" (image folder; by default that
    of the path) and "classes" (class names; by default the sorted names of all parts).

    Raises:
        UserError: a file cannot be read, or no image has a box.
    """
    path, subset = source["labels_path"], source["subset"]
    files = find_label_files(Path(path))
    parts = {part: list(read_labels(file)) for part, file in files.items()}
    if subset not in parts:
        raise UserError(f"'{path}' has no labels of the part '{subset}'")
    entries = [entry for part in parts.values() for entry in part]
    names = source.get("classes") or sorted({box.name for one in entries for box in one.boxes})
    if not names:
        raise_first([error for entry in entries for error in entry.errors])
        raise UserError(f"'{path}' has no boxes")
    root = Path(source.get("image_root") or (path if os.path.isdir(path) else Path(path).parent))
    _locate(parts[subset], root, files[subset].parent)
    return convert(parts[subset], names, root)


def _locate(entries: Sequence[LabelledImage], root: Path, folder: Path) -> None:
    """Sets ``file`` of each image. Files are searched in ``folder`` and then in ``root``."""
    by_name: dict[str, list[Path]] = {}
    for path in map(Path, list_images(root)):
        for key in {path.name, path.stem}:
            by_name.setdefault(key, []).append(path)
    for entry in entries:
        query = urllib.parse.parse_qs(urllib.parse.urlsplit(entry.name).query)
        address = urllib.parse.urlsplit(entry.name).path if "://" in entry.name else entry.name
        name = urllib.parse.unquote(query["d"][0] if "d" in query else address)
        name = name.replace("\\", "/").lstrip("/")
        last = name.rpartition("/")[2]
        tried = (folder / name, root / name, folder / last)
        found = [path for path in tried if path.is_file() and _is_below(path, root)][:1]
        for key in (last, _UPLOADED.sub("", last)):
            found = found or by_name.get(key, [])
        # If several images have this name, prefer those next to the labels.
        found = [path for path in found if _is_below(path, folder)] or found
        for start in range(1, name.count("/") + 1):  # compare the parent folders too
            tail = "/".join(["", *name.split("/")[start:]])
            found = [path for path in found if path.as_posix().endswith(tail)] or found
        reason = f"there is no image {short(last)} below '{root}'"
        if len(found) > 1:
            reason = f"{len(found)} images have the name {short(last)}: {join_first(found, 2)}"
        missing = DataError(MISSING_IMAGE, entry.place, reason)
        entry.file = str(found[0]) if len(found) == 1 else missing


def _is_below(path: Path, folder: Path) -> bool:
    return folder.resolve() in path.resolve().parents
