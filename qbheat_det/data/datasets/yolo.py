# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Reads data sets in the YOLO format of Ultralytics.

The keys path, train, val, names, nc and kpt_shape of ``data.yaml`` are used. Nothing is downloaded
or executed. A data set without ``data.yaml`` has folders "images" and "labels", possibly in parts
(train/images or images/train), and its classes are in ``classes.txt``.

The labels of ``…/images/a.jpg`` are in ``…/labels/a.txt``. A line has the class, center, width and
height of an object, or its class and a polygon, which is replaced by its bounding box. Coordinates
are fractions of the image's sides. An image without a label file has no objects.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from qbheat_det.core.errors import UserError
from qbheat_det.core.text import one_line
from qbheat_det.data.checks import DataError, short

from .conversion import MISSING_IMAGE, Converted, LabelledImage, convert, read_lines
from .image_folder import PART_NAMES, list_images

_YAMLS = ("data.yaml", "data.yml", "dataset.yaml")
_TOLERANCE = 0.01  # coordinates may be outside the image by this share of its side
_LARGEST = 10_000_000  # largest size of a data.yaml in bytes


@dataclass(frozen=True)
class YoloConfig:
    """A ``data.yaml``. ``subsets`` maps "train" and "val" to image folders, or lists of images."""

    file: Path
    names: list[str]
    subsets: dict[str, list[Path]]
    has_keypoints: bool = False
    warnings: tuple[str, ...] = ()


def _read_data_yaml(file: Path) -> YoloConfig:
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


def list_yolo_parts(path: Path) -> list[str]:
    """Returns the parts ("train", optionally "val") of a path, or [] if it is not YOLO."""
    is_yolo = path.suffix.lower() in (".yaml", ".yml") or any(
        (path / name).is_file() for name in _YAMLS
    )
    return list(read_yolo(path).subsets if is_yolo else _find_folders(path))


def _find_folders(root: Path) -> dict[str, list[Path]]:
    """Returns the image folders that have labels, for "train" and optionally "val"."""
    found = {
        subset: [folder]
        for subset, names in PART_NAMES.items()
        for name in names
        for folder in (root / name / "images", root / "images" / name)
        if _list_labels(folder)
    }
    whole = {"train": [root / "images"]} if _list_labels(root / "images") else {}
    return found if "train" in found else whole


def _list_labels(images: Path) -> list[Path]:
    """Returns the sorted label files of an image folder."""
    labels = find_label_file(images / "any").parent
    return sorted(set(labels.rglob("*.txt")) - {labels / "classes.txt"}) if images.is_dir() else []


def read_yolo(path: str | Path) -> YoloConfig:
    """Reads a ``data.yaml``, or a folder with or without a ``data.yaml``.

    Raises a ``UserError`` if the names or folders in a ``data.yaml`` are invalid.
    """
    root = Path(path).absolute()
    if not root.is_dir():
        return _read_data_yaml(root)
    if file := next((root / name for name in _YAMLS if (root / name).is_file()), None):
        return _read_data_yaml(file)
    subsets = _find_folders(root)
    folders = [folder for listed in subsets.values() for folder in listed]
    beside = [find_label_file(folder / "any").parent for folder in folders]
    files = [place / "classes.txt" for place in (root, root / "labels", *beside)]
    if file := next((file for file in files if file.is_file()), None):
        return YoloConfig(root / "classes.txt", [name for _, name in read_lines(file)], subsets)
    labels = [label for folder in folders for label in _list_labels(folder)]
    words = [line.split()[0] for label in labels for _, line in read_lines(label)]
    count = max((int(word) + 1 for word in words if word.isdecimal() and len(word) < 4), default=1)
    reason = f"{root}: no classes.txt names the classes, so they are named 0 to {count - 1}"
    names = [str(number) for number in range(count)]
    return YoloConfig(root / "classes.txt", names, subsets, warnings=(reason,))


def _list_images(config: YoloConfig, subset: str) -> list[LabelledImage]:
    """Returns the images of a subset without duplicates.

    Raises a ``UserError`` if a folder has no images, or a list file cannot be read.
    """
    images: dict[str, LabelledImage] = {}
    for source in config.subsets[subset]:
        if source.is_dir():
            images.update({path: LabelledImage(path, file=path) for path in list_images(source)})
            continue
        for place, name in read_lines(source):
            near = (source.parent / name, config.file.parent / name)
            if found := next((path for path in near if path.is_file()), None):
                path = os.path.normpath(found)
                images[path] = LabelledImage(path, file=path)
            else:
                missing = DataError(MISSING_IMAGE, place, f"there is no image '{name}'")
                images[place] = LabelledImage(place, file=missing)
    return list(images.values())


def convert_yolo(source: Mapping[str, Any]) -> Converted:
    """Converts a subset to COCO's format, with file names relative to the data.yaml.

    ``source`` has "yolo_file" (a data.yaml or its folder) and "subset" ("train" or "val").
    """
    config, subset = read_yolo(source["yolo_file"]), source["subset"]
    images = _list_images(config, subset)
    paths = [image.file for image in images if isinstance(image.file, str)]
    labels = {path: find_label_file(path) for path in paths}
    found = {path for path, file in labels.items() if file.is_file()}
    for image in images:
        if image.place in found:
            for place, line in read_lines(labels[image.place]):
                with image.reading(place):
                    _add_label(image, place, line, config)
    converted = convert(images, config.names, config.file.parent, by_index=True)
    converted.warnings += config.warnings
    if paths and not found:
        reason = f"no image of '{subset}' has a label file, such as '{labels[paths[0]]}'"
        converted.errors.append(DataError("no labels", str(config.file), reason))
    return converted


def find_label_file(image: str | Path) -> Path:
    """Returns the label file of an image. "labels" replaces the last "images" in its path."""
    path = Path(image).with_suffix(".txt")
    parts = list(path.parts)
    folders = [index for index, part in enumerate(parts[:-1]) if part == "images"]
    if folders:
        parts[folders[-1]] = "labels"
    return Path(*parts)


def _add_label(image: LabelledImage, place: str, line: str, config: YoloConfig) -> None:
    try:
        number, *values = map(float, line.split())
    except ValueError:
        must = "must be numbers, class, x, y, width and height"
        raise ValueError(f"{must}, but is {short(line)}") from None
    count = len(config.names)
    if number not in range(count):
        known = f"none of the {count} in names, which are numbered from 0"
        raise ValueError(f"class {line.split()[0]} is {known}")
    values = values[:4] if config.has_keypoints else values
    if len(values) < 4 or len(values) % 2:
        must = "must be class, x, y, width and height, or class and a polygon"
        raise ValueError(f"{must}, but has {len(values) + 1} numbers")
    if not all(-_TOLERANCE <= value <= 1 + _TOLERANCE for value in values):
        must = "must be fractions of the image's sides, from 0 to 1"
        raise ValueError(f"{must}, but is {short(line)}")
    if len(values) == 4:
        x, y, width, height = values
        values = [x - width / 2, y - height / 2, x + width / 2, y + height / 2]
    values = [min(max(value, 0.0), 1.0) for value in values]
    points = zip(values[::2], values[1::2], strict=True)
    image.add(place, int(number), points, is_relative=True)


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
    """Yields the folders and list files of a subset. They are relative to ``path`` or ``file``."""
    root = content.get("path") or ""
    entries = content[key] if isinstance(content[key], list) else [content[key]]
    for entry in entries:
        if not isinstance(entry, str) or not isinstance(root, str):
            raise UserError(f"'{file}': {key} and path must be paths, not {short(entry)}")
        # Some exports are one folder level deeper than their data.yaml states.
        tried = [file.parent / root / entry, file.parent / entry]
        tried.append(file.parent / entry.removeprefix("../"))
        found = next((path for path in tried if path.exists()), None)
        if found is None or not (found.is_dir() or found.suffix == ".txt"):
            raise UserError(
                f"'{file}': {key} is '{entry}', but there is no such folder or list of images "
                f"(.txt) in '{file.parent / root}'"
            )
        yield Path(os.path.normpath(found))
