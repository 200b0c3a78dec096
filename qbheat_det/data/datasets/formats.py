# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Recognises and opens the data sets that ``--data`` names.

``FORMATS`` has one row for each format. To add a format, write its functions and a row. To add the
export of another annotation tool, add a reader to ``label_files``.

A source is a dict that runs record as JSON. It has the key of its format: ``json_file`` with
``image_root``; ``yolo_file``, ``voc_folder``, ``labels_path`` or ``shards`` (an address) with
``subset``; or ``image_folders``. ``labelled`` tells whether boxes or class folders are read.
``classes`` fixes the classes of formats that do not list them. ``split`` names a part of the
images, see ``split.json``.
"""

import hashlib
import os
import shutil
import uuid
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from qbheat_det.core.errors import UserError
from qbheat_det.core.files import get_cache_dir
from qbheat_det.core.text import format_bytes, one_line
from qbheat_det.data.checks import raise_first
from qbheat_det.data.shards import absolute, are_shards, read_index

from .coco import is_coco, open_coco
from .coco_file import Converted
from .image_folder import IMAGE_SUFFIXES, PART_NAMES, list_images
from .label_files import TITLES, convert_labels, find_label_files, list_labelled_images
from .voc import convert_voc, find_voc_folders, find_voc_list
from .yolo import convert_yolo, find_yolo_folders, list_yolo_images, read_yolo

Source = dict[str, Any]
Kind = Literal["coco", "yolo", "voc", "labels", "classes", "images"]

_MOST_EXPANSION = 200  # of a zip
_YAMLS = ("data.yaml", "data.yml", "dataset.yaml")
_TAKEN = (
    "a COCO json or folder, YOLO with or without a data.yaml, Pascal VOC or LabelImg, a CSV of "
    "boxes, exports of Label Studio, CVAT or VIA, Hugging Face metadata, a zip of one of these, or "
    "a folder with a folder of images for each class (docs/train.md#data-formats)"
)


@dataclass(frozen=True)
class DataSource:
    """The format of a path, and the sources to train and to evaluate on."""

    kind: Kind
    train: Source
    val: Source | None = None


class Format(NamedTuple):
    """A row of ``FORMATS``: how to recognise and open a path, and how to read its sources.

    ``recognise`` looks at names and the first bytes. ``convert`` returns COCO lists of a source,
    which ``CocoFile`` checks. ``list_images`` returns the paths of a source's images.
    """

    kind: Kind
    key: str  # of a source, with its file or folder
    recognise: Callable[[Path], bool]
    open: Callable[[Path], list[Source]]
    convert: Callable[[Source], Converted] | None = None
    list_images: Callable[[Source], list[str]] | None = None


def _name_subsets(source: Source, train: str, val: str | None) -> list[Source]:
    return [{**source, "subset": subset} for subset in (train, val) if subset]


def _is_yolo(path: Path) -> bool:
    if path.suffix.lower() in (".yaml", ".yml"):
        return True
    return any((path / n).is_file() for n in _YAMLS) or bool(find_yolo_folders(path))


def _open_yolo(path: Path) -> list[Source]:
    files = [path] if path.is_file() else [f for n in _YAMLS if (f := path / n).is_file()]
    file = files[0] if files else path  # a folder without a data.yaml
    has_val = "val" in read_yolo(file).subsets
    source = {"yolo_file": str(file), "labelled": True}
    return _name_subsets(source, "train", "val" if has_val else None)


def _list_yolo(source: Source) -> list[str]:
    paths, errors = list_yolo_images(read_yolo(source["yolo_file"]), source["subset"])
    raise_first(errors)
    return paths


def _is_voc(path: Path) -> bool:
    return bool(find_voc_folders(path))


def _open_voc(path: Path) -> list[Source]:
    source = {"voc_folder": str(path), "labelled": True}
    if "train" in (folders := find_voc_folders(path)):
        return _name_subsets(source, "train", "val" if "val" in folders else None)
    train, val = (find_voc_list(path, subset) for subset in ("train", "val"))
    return _name_subsets(source, "train" if train else "all", "val" if train and val else None)


def _list_voc(source: Source) -> list[str]:
    folders, subset = find_voc_folders(source["voc_folder"]), source["subset"]
    return list_images(folders[subset if subset in folders else "all"][1])


def _open_labels(path: Path) -> list[Source]:
    source = {"labels_path": str(path), "labelled": True}
    return [{**source, "subset": part} for part in find_label_files(path)]


def _has_class_folders(path: Path) -> bool:
    return path.is_dir() and any(
        entry.is_dir() and not entry.name.startswith(".") for entry in os.scandir(path)
    )


def _open_classes(path: Path) -> list[Source]:
    parts = {entry.name for entry in path.iterdir() if entry.is_dir()}
    val = next((name for name in PART_NAMES["val"] if name in parts), None)
    folders = [path]
    # "train" may also be a class of vehicles.
    if val is not None and "train" in parts and not parts - {"train", *PART_NAMES["val"]}:
        folders = [path / "train", path / val]
    return [{"image_folders": [str(folder)], "labelled": True} for folder in folders]


# The first format that recognises a path opens it.
FORMATS = (
    Format(
        "yolo", "yolo_file", _is_yolo, _open_yolo,
        lambda source: convert_yolo(source["yolo_file"], source["subset"]), _list_yolo,
    ),
    Format(
        "voc", "voc_folder", _is_voc, _open_voc,
        lambda source: convert_voc(source["voc_folder"], source["subset"], source.get("classes")),
        _list_voc,
    ),
    Format(
        "labels", "labels_path", lambda path: bool(find_label_files(path)), _open_labels,
        lambda source: convert_labels(
            source["labels_path"], source["subset"],
            image_root=source.get("image_root", ""), classes=source.get("classes", ()),
        ),
        lambda source: list_labelled_images(
            source["labels_path"], source["subset"], image_root=source.get("image_root", "")
        ),
    ),
    Format("coco", "json_file", is_coco, open_coco),
    Format("classes", "image_folders", _has_class_folders, _open_classes),
)  # fmt: skip


def _recognise(path: str) -> Format:
    root = Path(path).absolute()
    if not root.exists():
        raise UserError(f"'{path}' does not exist")
    if row := next((row for row in FORMATS if row.recognise(root)), None):
        return row
    if root.is_dir() and any(file.suffix.lower() in IMAGE_SUFFIXES for file in root.iterdir()):
        raise UserError(
            f"'{path}' holds images without annotations: --data takes {_TAKEN}; --images takes "
            "images without labels, for pre-training"
        )
    raise UserError(f"'{path}' has no format that --data takes: {_TAKEN}")


def find_kind(path: str) -> Kind:
    """Returns the format of a file or a folder; raises a ``UserError`` if it is unknown."""
    path = unpack(path)
    if are_shards(path):
        packed: dict[str, Kind] = {"boxes": "coco", "classes": "classes", "images": "images"}
        return packed[read_index(absolute(path))["kind"]]
    return _recognise(path).kind


def open_source(path: str, image_root: str = "", *, likely_root: str = "") -> DataSource:
    """Returns the sources of a file, a folder, a zip or shards, or raises a ``UserError``.

    ``image_root`` is the folder of the images of a label file, such as a COCO json. By default it
    is searched beside the file, and in ``likely_root`` first.
    """
    path = unpack(path)
    kind, root = find_kind(path), Path(path).absolute()
    if image_root and (kind not in ("coco", "labels") or are_shards(path)):
        raise UserError(f"'{path}' contains its images, so it takes no image folder '{image_root}'")
    if are_shards(path):
        if kind == "images":
            raise UserError(f"the shards at '{path}' have no labels: name them with --images")
        return _open_shards(kind, path)
    if kind == "coco":
        return DataSource(kind, *open_coco(root, image_root, likely_root))
    sources = next(row for row in FORMATS if row.kind == kind).open(root)
    if kind == "labels" and (image_root or (likely_root and root.is_file())):
        sources = [{**one, "image_root": image_root or likely_root} for one in sources]
    return DataSource(kind, *sources)


def open_images(paths: Sequence[str]) -> DataSource:
    """Returns the source of images without labels, from folders or from one set of shards."""
    if not any(map(are_shards, paths)):
        folders = [os.path.abspath(folder) for folder in paths]
        return DataSource("images", {"image_folders": folders, "labelled": False})
    if len(paths) > 1:
        raise UserError(f"--images takes one set of shards: pack {' and '.join(paths)} together")
    return _open_shards("images", paths[0])


def _open_shards(kind: Kind, path: str) -> DataSource:
    address = absolute(path)
    source = {"shards": address, "labelled": kind != "images"}
    has_val = "val" in read_index(address)["parts"]
    return DataSource(kind, *_name_subsets(source, "train", "val" if has_val else None))


def with_classes(source: Source, classes: Sequence[str]) -> Source:
    """Fixes the classes of a source whose files do not list them: one part may lack some."""
    takes = classes and not source.keys().isdisjoint(("voc_folder", "labels_path"))
    return {**source, "classes": list(classes)} if takes else source


def describe_source(source: Source) -> str:
    """Returns the name of a source's format, such as "YOLO"."""
    if "labels_path" in source:
        file = find_label_files(Path(source["labels_path"])).get(source["subset"])
        return TITLES[file.kind] if file else "labels"
    return next(title for key, title in _FORMAT_TITLES.items() if key in source)


_FORMAT_TITLES = {
    "json_file": "COCO",
    "yolo_file": "YOLO",
    "voc_folder": "Pascal VOC",
    "image_folders": "image folders",
    "shards": "shards",
}


def unpack(path: str) -> str:
    """Unpacks a zip into the cache folder and returns its folder; returns other paths as they are.

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
        partial = folder.with_name(f"{folder.name}.{uuid.uuid4().hex[:8]}.incomplete")
        try:
            with zipfile.ZipFile(path) as archive:
                size = sum(entry.file_size for entry in archive.infolist())
                partial.mkdir(parents=True)
                if size > min(_MOST_EXPANSION * state.st_size, shutil.disk_usage(partial).free):
                    raise UserError(f"'{path}' would unpack to {format_bytes(size)}")
                archive.extractall(partial)  # which drops ".." and absolute paths
            os.replace(partial, folder)
        except (zipfile.BadZipFile, OSError, RuntimeError, NotImplementedError) as error:
            raise UserError(f"'{path}' cannot be unpacked: {one_line(error)}") from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    inner = [entry for entry in folder.iterdir() if not entry.name.startswith((".", "__MACOSX"))]
    return str(inner[0] if len(inner) == 1 else folder)


def origin_of(source: Source) -> str:
    """Returns the file or folder of a source, for messages."""
    found = next(source[key] for key in (*(row.key for row in FORMATS), "shards") if key in source)
    return str(found if isinstance(found, str) else found[0])
