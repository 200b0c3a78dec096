# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Reads data sets in the format of Ultralytics' YOLO: ``data.yaml``, image folders, label files.

Of the ``data.yaml``, ``path``, ``train``, ``val``, ``names``, ``nc`` and ``kpt_shape`` are read;
nothing is downloaded or run. Without it, folders named "images" and "labels" are read, alone or in
parts (train/images or images/train), with the classes of ``classes.txt``. The labels of
``…/images/a.jpg`` are in ``…/labels/a.txt``, one object a line: class, centre, width and height, or
class and a polygon, which is replaced by its box. Coordinates are fractions of the image's sides.
An image without a label file has no objects.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from qbheat_det.core.errors import UserError
from qbheat_det.core.text import join_first, one_line
from qbheat_det.data.checks import DataError, short
from qbheat_det.data.images import read_sizes

from .coco_file import Converted
from .image_folder import PART_NAMES, list_images

_TOLERANCE = 0.01  # coordinates may lie outside the image by this much
_LARGEST = 10_000_000  # bytes of a data.yaml


@dataclass(frozen=True)
class YoloConfig:
    """The content of a ``data.yaml``; ``subsets`` are folders and lists of images."""

    file: Path
    names: list[str]
    subsets: dict[str, list[Path]]
    has_keypoints: bool
    warnings: tuple[str, ...] = ()


def read_data_yaml(file: str | Path) -> YoloConfig:
    """Reads a ``data.yaml``; raises a ``UserError`` if its names or folders are not valid."""
    file = Path(file).absolute()
    try:
        if file.stat().st_size > _LARGEST:
            raise UserError(f"'{file}' is too large for a data.yaml")
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError, ValueError) as error:
        raise UserError(f"'{file}' cannot be read as YAML: {one_line(error)}") from error
    if not isinstance(content, dict) or "train" not in content:
        raise UserError(f"'{file}' is not a data.yaml of YOLO: it has no 'train'")
    names = _read_names(file, content)
    subsets = {
        key: list(_resolve(file, content, key)) for key in ("train", "val") if content.get(key)
    }
    return YoloConfig(file, names, subsets, bool(content.get("kpt_shape")))


def find_yolo_folders(root: Path) -> dict[str, list[Path]]:
    """Returns the folders of images with labels, "train" and perhaps "val", or none."""
    found = {
        subset: [folder]
        for subset, names in PART_NAMES.items()
        for folder in [
            f for name in names for f in (root / name / "images", root / "images" / name)
        ]
        if list_labels(folder)
    }
    whole = {"train": [root / "images"]} if list_labels(root / "images") else {}
    return found if "train" in found else whole


def list_labels(images: Path) -> list[Path]:
    """Returns the sorted label files of a folder of images."""
    labels = find_label_file(str(images / "any")).parent
    return sorted(set(labels.rglob("*.txt")) - {labels / "classes.txt"}) if images.is_dir() else []


def read_yolo(path: str | Path) -> YoloConfig:
    """Reads a ``data.yaml``, or a folder without one; raises as ``read_data_yaml``."""
    root = Path(path).absolute()
    if not root.is_dir():
        return read_data_yaml(root)
    subsets = find_yolo_folders(root)
    folders = [folder for listed in subsets.values() for folder in listed]
    beside = [find_label_file(str(folder / "any")).parent for folder in folders]
    files = [place / "classes.txt" for place in (root, root / "labels", *beside)]
    if file := next((file for file in files if file.is_file()), None):
        names = [line.strip() for line in _read_lines(file) if line.strip()]
        return YoloConfig(
            file if file.parent == root else root / "classes.txt", names, subsets, False
        )
    labels = [label for folder in folders for label in list_labels(folder)]
    first = [line.split()[0] for label in labels for line in _read_lines(label) if line.strip()]
    count = max((int(word) + 1 for word in first if word.isdecimal() and len(word) < 4), default=1)
    reason = f"{root}: no classes.txt names the classes, so that they are named 0 to {count - 1}"
    names = [str(number) for number in range(count)]
    return YoloConfig(root / "classes.txt", names, subsets, False, (reason,))


def list_yolo_images(config: YoloConfig, subset: str) -> tuple[list[str], list[DataError]]:
    """Returns the paths of a subset's images without repetitions, and errors of missing images.

    Raises a ``UserError`` if a folder has no image, or a list cannot be read.
    """
    paths: dict[str, None] = {}
    errors = []
    for place in config.subsets[subset]:
        if place.is_dir():
            paths.update(dict.fromkeys(list_images(place)))
            continue
        for number, line in enumerate(_read_lines(place), start=1):
            if not (name := line.strip()):
                continue
            near = (place.parent / name, config.file.parent / name)
            if found := next((path for path in near if path.is_file()), None):
                paths[os.path.normpath(found)] = None
            else:
                reason = f"there is no image '{name}'"
                errors.append(DataError("missing image file", f"{place}, line {number}", reason))
    return list(paths), errors


def convert_yolo(file: str, subset: str) -> Converted:
    """Returns a subset as COCO lists; file names are relative to the data.yaml.

    ``file`` is a data.yaml or a folder without one.
    """
    config = read_yolo(file)
    converted = Converted(config.names)
    paths, converted.errors = list_yolo_images(config, subset)
    converted.warnings = [*config.warnings, *_find_orphans(config, subset, paths)]
    any_label = False
    for path, size in zip(paths, read_sizes(paths), strict=True):
        label = find_label_file(path)
        lines = _read_lines(label) if label.is_file() else []
        any_label |= label.is_file()
        if isinstance(size, DataError):
            converted.errors.append(size)
            continue
        width, height = size
        image_id = converted.add_image(path, os.path.relpath(path, config.file.parent), size)
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where, found = f"{label}, line {number}", _parse(line, config)
            if isinstance(found, str):
                converted.errors.append(DataError("wrong label", where, found))
                continue
            class_id, (left, top, right, bottom) = found
            box = [left * width, top * height, (right - left) * width, (bottom - top) * height]
            converted.add_box(where, image_id, class_id, box)
    if paths and not any_label:
        reason = f"no image of '{subset}' has a label file, such as '{find_label_file(paths[0])}'"
        converted.errors.append(DataError("no labels", str(config.file), reason))
    return converted


def _find_orphans(config: YoloConfig, subset: str, paths: Sequence[str]) -> list[str]:
    """Returns a warning for each folder "labels" of a subset with files that lack an image."""
    known = {find_label_file(path) for path in paths}
    warnings = []
    for folder in filter(Path.is_dir, config.subsets[subset]):
        labels = find_label_file(str(folder / "any")).parent
        orphans = sorted(set(labels.rglob("*.txt")) - known - {labels / "classes.txt"})
        if orphans and labels != folder:  # else other text may lie among the images
            names = join_first(file.relative_to(labels) for file in orphans)
            warnings.append(f"{labels}: no image for the labels {names}")
    return warnings


def find_label_file(image: str) -> Path:
    """Returns the label file of an image; "labels" replaces the last "images" in its path."""
    folder, name = os.path.split(image)
    parts = folder.split(os.sep)
    if "images" in parts:
        last = len(parts) - 1 - parts[::-1].index("images")
        parts[last] = "labels"
    return Path(os.sep.join(parts), name).with_suffix(".txt")


def _parse(line: str, config: YoloConfig) -> tuple[int, list[float]] | str:
    """Returns class and box (left, top, right, bottom; in fractions), or the error."""
    try:
        number, *values = map(float, line.split())
    except ValueError:
        return f"must be numbers, class, x, y, width and height, but is {short(line)}"
    count = len(config.names)
    if number not in range(count):
        return f"class {line.split()[0]} is none of the {count} in names, which count from 0"
    values = values[:4] if config.has_keypoints else values
    if len(values) < 4 or len(values) % 2:
        return (
            "must be class, x, y, width and height, or class and a polygon, but has "
            f"{len(values) + 1} numbers"
        )
    if not all(-_TOLERANCE <= value <= 1 + _TOLERANCE for value in values):
        return f"must be fractions of the image's sides, from 0 to 1, but is {short(line)}"
    if len(values) == 4:
        x, y, width, height = values
        box = [x - width / 2, y - height / 2, x + width / 2, y + height / 2]
    else:
        xs, ys = values[::2], values[1::2]
        box = [min(xs), min(ys), max(xs), max(ys)]
    return int(number), [min(max(value, 0.0), 1.0) for value in box]


def _read_names(file: Path, content: dict[str, Any]) -> list[str]:
    names = content.get("names")
    if isinstance(names, dict) and set(names) == set(range(len(names))):
        names = [names[index] for index in range(len(names))]
    if not isinstance(names, list) or not names:
        raise UserError(f"'{file}': names must list the classes, or map 0, 1, … to them")
    if (count := content.get("nc", len(names))) != len(names):
        raise UserError(f"'{file}': nc is {short(count)}, but names has {len(names)} classes")
    return [str(name) for name in names]


def _resolve(file: Path, content: dict[str, Any], key: str) -> Iterator[Path]:
    """Yields the folders and lists of a subset, relative to ``path`` or to the file's folder."""
    root = content.get("path") or ""
    entries = content[key] if isinstance(content[key], list) else [content[key]]
    for entry in entries:
        if not isinstance(entry, str) or not isinstance(root, str):
            raise UserError(f"'{file}': {key} and path must be paths, not {short(entry)}")
        # Exports are often a level deeper than their data.yaml says.
        tried = [file.parent / root / entry, file.parent / entry]
        tried.append(file.parent / entry.removeprefix("../"))
        found = next((path for path in tried if path.exists()), None)
        if found is None or not (found.is_dir() or found.suffix == ".txt"):
            raise UserError(
                f"'{file}': {key} is '{entry}', but there is no such folder or list of images "
                f"(.txt) in '{file.parent / root}'"
            )
        yield Path(os.path.normpath(found))


def _read_lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise UserError(f"'{file}' cannot be read: {error.strerror}") from error
