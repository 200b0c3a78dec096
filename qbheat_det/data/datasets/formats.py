# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Detects the format of the data sets given by ``--data``, and opens them.

``FORMATS`` lists the formats that are converted to COCO's format. To add a format, write its
functions, and add a row to ``FORMATS``, its name to ``Kind`` and its title to ``_TITLES``. If the
files do not list the classes, add the format's key to ``with_classes``. To add the export of an
annotation tool, add a reader to ``label_files``. ``_TAKEN`` and ``SOURCES`` in
``tools/arguments.py`` name all formats for users.

A source is a dict that describes a training or validation set, and is saved as JSON with each run.
It has one of the keys ``json_file`` (with ``image_root``), ``image_folders``, ``yolo_file``,
``voc_folder`` (also for LabelImg) and ``labels_path``. The last three also need ``subset``.
``labelled`` is whether to read the boxes or classes. ``classes`` sets the classes of formats that
do not list them. ``split`` names a ``split.json`` and the part of the images to use.
"""

import hashlib
import json
import os
import re
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from qbheat_det.core.errors import UserError
from qbheat_det.core.files import get_cache_dir
from qbheat_det.core.text import format_bytes, one_line

from .conversion import Converted
from .image_folder import IMAGE_SUFFIXES, PART_NAMES
from .label_files import READERS, convert_labels, find_label_files
from .voc import convert_voc, find_voc_parts
from .yolo import convert_yolo, list_yolo_parts

Source = dict[str, Any]
Kind = Literal["coco", "yolo", "voc", "labels", "classes", "images"]

_MOST_EXPANSION = 200  # largest ratio of the unpacked size to the size of a zip
_FILE_NAME = re.compile(r'"file_name"\s*:\s*("(?:[^"\\]|\\.)*")')
_COCO = {
    "train": ("annotations/instances_train*.json", "train/_annotations.coco.json"),
    "whole": ("annotations.json", "_annotations.coco.json"),
    "val": ("annotations/instances_val*.json", "val*/_annotations.coco.json"),
}
_TAKEN = (
    "a COCO json or folder, YOLO with or without a data.yaml, Pascal VOC or LabelImg, a CSV of "
    "boxes, exports of Label Studio, CVAT or VIA, Hugging Face metadata, a zip of one of these, or "
    "a folder with a folder of images for each class (docs/train.md#data-formats)"
)


@dataclass(frozen=True)
class DataSource:
    """The format of a path, its training source, and its validation source or None."""

    kind: Kind
    train: Source
    val: Source | None = None


class Format(NamedTuple):
    """A row of ``FORMATS``.

    ``key`` is the key of the path in a source. ``list_parts`` returns the parts of a path ("all",
    or "train" and optionally "val"), or nothing if the path has a different format. ``convert``
    converts a source to COCO's format, which ``CocoFile`` checks.
    """

    key: str
    list_parts: Callable[[Path], Collection[str]]
    convert: Callable[[Source], Converted]


# The first format that finds a part in a path is used.
FORMATS: dict[Kind, Format] = {
    "yolo": Format("yolo_file", list_yolo_parts, convert_yolo),
    "voc": Format("voc_folder", find_voc_parts, convert_voc),
    "labels": Format("labels_path", find_label_files, convert_labels),
}
_TITLES = {
    "json_file": "COCO",
    "yolo_file": "YOLO",
    "voc_folder": "Pascal VOC",
    "image_folders": "image folders",
    "labels_path": "labels",
}


def find_kind(path: str) -> Kind:
    """Returns the format of a file or folder. Raises a ``UserError`` if it is unknown."""
    path = unpack(path)
    root = Path(path).absolute()
    if not root.exists():
        raise UserError(f"'{path}' does not exist")
    for kind, row in FORMATS.items():
        if row.list_parts(root):
            return kind
    if root.suffix.lower() == ".json" or any(_find_json(root, part) for part in _COCO):
        return "coco"
    entries = list(root.iterdir()) if root.is_dir() else []
    if any(entry.is_dir() and not entry.name.startswith(".") for entry in entries):
        return "classes"
    if any(entry.suffix.lower() in IMAGE_SUFFIXES for entry in entries):
        raise UserError(
            f"'{path}' has images without annotations. --data needs {_TAKEN}. --images accepts "
            "images without labels, for pre-training"
        )
    raise UserError(f"'{path}' has no supported format: --data needs {_TAKEN}")


def open_source(path: str, image_root: str = "", *, likely_root: str = "") -> DataSource:
    """Finds the format of a file, a folder or a zip. Raises a ``UserError`` if it is unknown.

    ``image_root`` is the image folder of a label file, such as a COCO json. If it is empty, the
    images are looked for in ``likely_root``, and then next to the label file.
    """
    path = unpack(path)
    kind, root = find_kind(path), Path(path).absolute()
    if image_root and kind not in ("coco", "labels"):
        raise UserError(f"'{path}' contains its images: leave out the image folder '{image_root}'")
    if kind == "coco":
        files = [file for part in _COCO if (file := _find_json(root, part))][:2] or [root]
        return DataSource(kind, *(_locate_images(file, image_root, likely_root) for file in files))
    if kind == "classes":
        folders = _find_class_folders(root)
        return DataSource(kind, *({"image_folders": [one], "labelled": True} for one in folders))
    row = FORMATS[kind]
    source = {row.key: str(root), "labelled": True}
    if kind == "labels" and (image_root or (likely_root and root.is_file())):
        source["image_root"] = image_root or likely_root
    return DataSource(kind, *({**source, "subset": part} for part in row.list_parts(root)))


def open_images(paths: Sequence[str]) -> DataSource:
    """Returns the source of unlabelled images in folders."""
    folders = [os.path.abspath(folder) for folder in paths]
    return DataSource("images", {"image_folders": folders, "labelled": False})


def _find_class_folders(path: Path) -> list[str]:
    """Returns the training and validation folders in ``path``, or ``path`` if it has none."""
    parts = {entry.name for entry in path.iterdir() if entry.is_dir()}
    val = next((name for name in PART_NAMES["val"] if name in parts), None)
    # "train" may be the class of trains, so there must not be any other folders.
    if val is not None and "train" in parts and not parts - {"train", *PART_NAMES["val"]}:
        return [str(path / "train"), str(path / val)]
    return [str(path)]


def _find_json(root: Path, part: str) -> Path | None:
    """Returns the COCO json of a part in a folder if it is in one of the usual locations."""
    files = [path for pattern in _COCO[part] for path in sorted(root.glob(pattern))]
    if len(files) > 1:
        names = " and ".join(str(path.relative_to(root)) for path in files)
        raise UserError(f"'{root}' has {names}: pass one of them")
    return files[0] if files else None


def _locate_images(json_file: Path, given: str, likely: str) -> dict[str, Any]:
    """Returns the source of a COCO json, with the folder that contains its first image.

    ``given`` is the image folder if the user has specified it. Otherwise, ``likely`` and then the
    folders near the file are searched. Raises a ``UserError`` if no folder is found.
    """
    above, subset = json_file.parent.parent, json_file.stem.removeprefix("instances_")
    beside = [json_file.parent / "images", above / "images", json_file.parent]
    beside += [above / "images" / subset, above / subset, json_file.parent / subset]
    likely_folders = [*([Path(likely).absolute()] if likely else []), *beside[:2]]
    first = "" if given else _read_first_name(json_file)
    if given or not first:  # broken files are reported later
        folders = [Path(given or json_file.parent).absolute()]
    else:
        folders = [one for one in (*likely_folders, *beside[2:]) if one.is_dir()]
        folders = [one for one in folders if (one / first).is_file()]
        # The first image may be missing, so use a likely folder that exists.
        folders = folders or [one for one in likely_folders if one.is_dir()]
    if not folders:
        raise UserError(
            f"the images of '{json_file}', such as '{first}', were not found: set their folder "
            "with --images, or with --val-images for --val"
        )
    return {"json_file": str(json_file), "image_root": str(folders[0]), "labelled": True}


def _read_first_name(json_file: Path) -> str:
    """Returns the first ``file_name`` in a COCO json, or "" if there is none."""
    match = _FILE_NAME.search(json_file.read_text(encoding="utf-8", errors="replace"))
    try:
        return str(json.loads(match[1])) if match else ""
    except ValueError:
        return ""


def with_classes(source: Source, classes: Sequence[str]) -> Source:
    """Returns a source with its classes set, if the files of its format do not list the classes.

    Without the key "classes", such a source has the classes that occur in its own files.
    """
    takes = classes and not source.keys().isdisjoint(("voc_folder", "labels_path"))
    return {**source, "classes": list(classes)} if takes else source


def describe_source(source: Source) -> str:
    """Returns the name of the format of a source, such as "YOLO"."""
    if "labels_path" in source:
        file = find_label_files(Path(source["labels_path"])).get(source["subset"])
        if file:
            return READERS[file.kind][0]
    return next(title for key, title in _TITLES.items() if key in source)


def origin_of(source: Source) -> str:
    """Returns the path of a source, for messages."""
    found = next(source[key] for key in _TITLES if key in source)
    return str(found if isinstance(found, str) else found[0])


def unpack(path: str) -> str:
    """Unpacks a zip into the cache folder and returns the folder. Returns other paths unchanged.

    Raises:
        UserError: the file is not a valid zip, or is too large for the disk.
    """
    if not (path.lower().endswith(".zip") and os.path.isfile(path)):
        return path
    state = os.stat(path)
    identity = f"{os.path.abspath(path)}|{state.st_size}|{state.st_mtime_ns}"
    digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
    folder = get_cache_dir() / "unpacked" / f"{Path(path).stem}_{digest}"
    if not folder.is_dir():
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with (
                zipfile.ZipFile(path) as archive,
                tempfile.TemporaryDirectory(prefix=".zip_", dir=folder.parent) as partial,
            ):
                size = sum(entry.file_size for entry in archive.infolist())
                if size > min(_MOST_EXPANSION * state.st_size, shutil.disk_usage(partial).free):
                    raise UserError(f"'{path}' would unpack to {format_bytes(size)}")
                archive.extractall(Path(partial, "set"))  # drops ".." and absolute paths
                os.replace(Path(partial, "set"), folder)
        except (zipfile.BadZipFile, OSError, RuntimeError, NotImplementedError) as error:
            raise UserError(f"'{path}' cannot be unpacked: {one_line(error)}") from error
    inner = [entry for entry in folder.iterdir() if not entry.name.startswith((".", "__MACOSX"))]
    return str(inner[0] if len(inner) == 1 else folder)
