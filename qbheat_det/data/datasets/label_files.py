# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Converts the exports of annotation tools, with one reader per kind of file.

``convert_labels`` finds the image files, and returns COCO's ``images``, ``annotations`` and
``categories`` lists. Polygons, ellipses and rotated boxes are replaced by their bounding boxes.
"""

import csv
import os
import re
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from qbheat_det.core.errors import UserError
from qbheat_det.core.text import join_first, one_line
from qbheat_det.data.checks import DataError, raise_first, short

from . import annotation_tools as tools
from .conversion import MISSING_IMAGE, Converted, LabelledImage, convert
from .image_folder import PART_NAMES, list_images

_LARGEST = 500_000_000  # largest size of a label file in bytes
_HEAD = 4096  # bytes from which the kind of a JSON file is detected
_UPLOADED = re.compile(r"^[0-9a-f]{8}-")  # Label Studio adds this prefix to uploaded files
_PART_FILE = "{part}*.csv"


class LabelFile(NamedTuple):
    """A label file and its kind, which is a key of ``READERS``."""

    kind: str
    path: Path


def find_label_files(path: Path) -> dict[str, LabelFile]:
    """Maps "train" and optionally "val", or else "all", to label files. Returns {} for none."""
    if path.is_file():
        kind = _find_kind(path)
        return {"all": LabelFile(kind, path)} if kind else {}
    if not path.is_dir():
        return {}
    parts = {}
    for part, names in PART_NAMES.items():
        for name in names:
            tables = sorted(path.glob(_PART_FILE.format(part=name)))
            found = LabelFile("csv", tables[0]) if len(tables) == 1 else _find_in(path / name)
            if found and part not in parts:
                parts[part] = found
    if "train" in parts:
        return parts
    return {"all": found} if (found := _find_in(path)) else {}


def _find_in(folder: Path) -> LabelFile | None:
    """Returns the only label file of a folder."""
    if not folder.is_dir():
        return None
    files = sorted(file for file in folder.iterdir() if file.is_file())
    found = [LabelFile(kind, file) for file in files if (kind := _find_kind(file))]
    named = [one for one in found if one.path.name.startswith(("metadata.", "_annotations."))]
    return chosen[0] if len(chosen := named or found) == 1 else None


def _find_kind(file: Path) -> str:
    """Detects the kind of a file by its suffix and first bytes. "" means it is not a label file."""
    suffix = file.suffix.lower()
    if suffix not in (".csv", ".json", ".jsonl", ".xml"):
        return ""
    try:
        with file.open("rb") as stream:
            head = stream.read(_HEAD).decode("utf-8", errors="replace").lstrip("\ufeff \n\r\t")
    except OSError:
        return ""
    if suffix == ".csv":
        first = head.partition("\n")[0].lower()
        if "file_name" in first and "objects" in first:
            return "huggingface"
        return "csv" if tools.find_columns(next(csv.reader([first]), [])) else ""
    if suffix == ".jsonl":
        return "huggingface" if '"file_name"' in head else ""
    if suffix == ".xml":
        return "cvat" if "<annotations" in head else ""
    if head.startswith("["):
        return "label_studio"
    return "via" if '"_via_' in head or ('"regions"' in head and '"filename"' in head) else ""


def read_labels(file: LabelFile) -> Iterator[LabelledImage]:
    """Yields the images of a label file.

    Raises:
        UserError: the file cannot be read, or its content does not match its kind.
    """
    title, read = READERS[file.kind]
    try:
        if file.path.stat().st_size > _LARGEST:
            raise UserError(f"'{file.path}' is too large for a file of labels")
        yield from read(file.path)
    except (OSError, KeyError, TypeError, ValueError, AttributeError, csv.Error) as error:
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise UserError(f"'{file.path}' is not a file of {title} ({reason})") from error


READERS: dict[str, tuple[str, Callable[[Path], Iterator[LabelledImage]]]] = {
    "csv": ("CSV", tools.read_csv),
    "via": ("VGG Image Annotator", tools.read_via),
    "label_studio": ("Label Studio", tools.read_label_studio),
    "cvat": ("CVAT", tools.read_cvat),
    "huggingface": ("Hugging Face metadata", tools.read_hugging_face),
}
"""The title and the reader of each kind of label file."""


def convert_labels(source: Mapping[str, Any]) -> Converted:
    """Converts a subset to COCO's format, with file names relative to the image folder.

    ``source`` has the keys "labels_path" (a label file or a folder with label files) and "subset"
    (a key of ``find_label_files``). Optional keys are "image_root" (image folder; by default the
    folder of the path) and "classes" (class names; by default the sorted names of all parts).

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
    _locate(parts[subset], root, files[subset].path.parent)
    return convert(parts[subset], names, root)


def _locate(entries: Sequence[LabelledImage], root: Path, folder: Path) -> None:
    """Sets ``file`` of each image. Files are searched in ``folder`` and then in ``root``."""
    by_name: dict[str, list[Path]] = {}
    for path in map(Path, list_images(root)):
        for key in {path.name, path.stem}:
            by_name.setdefault(key, []).append(path)
    for entry in entries:
        name = _find_path(entry.name).replace("\\", "/").lstrip("/")
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


def _find_path(address: str) -> str:
    """Returns the path in a path or URL. Label Studio names local files in the query, as ``d``."""
    url = urllib.parse.urlsplit(address)
    queries = [part[2:] for part in url.query.split("&") if part.startswith("d=")]
    path = queries[0] if queries else url.path if "://" in address else address
    return os.fsdecode(urllib.parse.unquote_to_bytes(os.fsencode(path)))


def _is_below(path: Path, folder: Path) -> bool:
    return folder.resolve() in path.resolve().parents
