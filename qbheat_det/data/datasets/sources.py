# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Recognises the data sets that ``--data`` names, and registers them with Detectron2.

``FORMATS`` has one row for each format. To add a format, write its three functions and a row.

A source is a dict that runs record as JSON. It has the key of its format, such as ``json_file``
with ``image_root``, or ``yolo_file``, ``voc_folder`` or ``shards`` (an address) with ``subset``, or
``image_folders``. ``labelled`` tells whether boxes or class folders are read. ``classes`` fixes the
classes of VOC. ``split`` names a part of the images, see ``split.json``.
"""

import functools
import json
import os
import re
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from detectron2.data import DatasetCatalog, MetadataCatalog

from qbheat_det.core.errors import UserError
from qbheat_det.data.checks import raise_first
from qbheat_det.data.shards import (
    PREFIX,
    absolute,
    are_shards,
    has_boxes,
    locate_image,
    read_index,
    read_part,
)

from .coco import (
    check_coco_file,
    is_coco,
    load_coco_images,
    open_coco,
    register_coco_images,
    register_coco_json,
)
from .coco_file import CocoFile, Converted
from .image_folder import (
    IMAGE_SUFFIXES,
    PART_NAMES,
    check_image_folder,
    list_images,
    load_image_folders,
    register_image_folders,
    register_shards,
)
from .splits import group_by_rarest_class, read_split, split_names
from .voc import convert_voc, find_voc_folders, find_voc_list
from .yolo import convert_yolo, find_yolo_folders, list_yolo_images, read_yolo

Source = dict[str, Any]
Kind = Literal["coco", "yolo", "voc", "classes", "images"]

_VAL_NAMES = PART_NAMES["val"]
_YAMLS = ("data.yaml", "data.yml", "dataset.yaml")
_TAKEN = (
    "a COCO json, a folder with annotations/instances_train.json, a data.yaml of YOLO or a folder "
    "with images/ and labels/, a folder of Pascal VOC with Annotations/ and JPEGImages/ or with "
    "a.xml beside a.jpg, or a folder with a folder of images for each class"
)


@dataclass(frozen=True)
class DataSource:
    """The format of a path, and the sources to train and to evaluate on."""

    kind: Kind
    train: Source
    val: Source | None = None


class Format(NamedTuple):
    """A row of ``FORMATS``: how to recognise and open a path, and how to read its sources.

    ``recognise`` judges by names alone. ``convert`` takes path, subset and perhaps classes, and
    returns COCO lists, which ``CocoFile`` checks. ``list_images`` takes path and subset, and
    returns the paths of the images, whose labels are not read.
    """

    kind: Kind
    key: str  # of a source, with its file or folder
    recognise: Callable[[Path], bool]
    open: Callable[[Path], list[Source]]
    convert: Callable[[str, str, Sequence[str] | None], Converted] | None = None
    list_images: Callable[[str, str], list[str]] | None = None


def _name_subsets(source: Source, train: str, val: str | None) -> list[Source]:
    return [{**source, "subset": subset} for subset in (train, val) if subset]


def _is_yolo(path: Path) -> bool:
    has_yaml = path.suffix.lower() in (".yaml", ".yml") or any((path / n).is_file() for n in _YAMLS)
    return has_yaml or bool(find_yolo_folders(path))


def _open_yolo(path: Path) -> list[Source]:
    yamls = [file for name in _YAMLS if (file := path / name).is_file()]
    file = yamls[0] if yamls else path
    has_val = "val" in read_yolo(file).subsets
    source = {"yolo_file": str(file), "labelled": True}
    return _name_subsets(source, "train", "val" if has_val else None)


def _list_yolo(file: str, subset: str) -> list[str]:
    paths, errors = list_yolo_images(read_yolo(file), subset)
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


def _list_voc(folder: str, subset: str) -> list[str]:
    folders = find_voc_folders(folder)
    return list_images(folders[subset if subset in folders else "all"][1])


def _has_class_folders(path: Path) -> bool:
    return path.is_dir() and any(
        entry.is_dir() and not entry.name.startswith(".") for entry in os.scandir(path)
    )


def _open_classes(path: Path) -> list[Source]:
    parts = {entry.name for entry in path.iterdir() if entry.is_dir()}
    val = next((name for name in _VAL_NAMES if name in parts), None)
    folders = [path]
    # "train" may also be a class of vehicles.
    if val is not None and "train" in parts and not parts - {"train", *_VAL_NAMES}:
        folders = [path / "train", path / val]
    return [{"image_folders": [str(folder)], "labelled": True} for folder in folders]


# The first format that recognises a path opens it.
FORMATS = (
    Format("coco", "json_file", is_coco, open_coco),
    Format("yolo", "yolo_file", _is_yolo, _open_yolo, convert_yolo, _list_yolo),
    Format("voc", "voc_folder", _is_voc, _open_voc, convert_voc, _list_voc),
    Format("classes", "image_folders", _has_class_folders, _open_classes),
)


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
    if are_shards(path):
        packed: dict[str, Kind] = {"boxes": "coco", "classes": "classes", "images": "images"}
        return packed[read_index(absolute(path))["kind"]]
    return _recognise(path).kind


def open_source(path: str, image_root: str = "", *, likely_root: str = "") -> DataSource:
    """Returns the sources of a file, a folder or shards, or raises a ``UserError``.

    ``image_root`` is the folder of a COCO json's images. By default it is searched beside the file,
    and in ``likely_root`` first.
    """
    kind, root = find_kind(path), Path(path).absolute()
    if image_root and (kind != "coco" or are_shards(path)):
        raise UserError(f"'{path}' is no COCO json, so it takes no image folder '{image_root}'")
    if are_shards(path):
        if kind == "images":
            raise UserError(f"the shards at '{path}' have no labels: name them with --images")
        return _open_shards(kind, path)
    if kind == "coco":
        return DataSource(kind, *open_coco(root, image_root, likely_root))
    return DataSource(kind, *next(row for row in FORMATS if row.kind == kind).open(root))


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


def origin_of(source: Source) -> str:
    """Returns the file or folder of a source, for messages."""
    found = next(source[key] for key in (*(row.key for row in FORMATS), "shards") if key in source)
    return str(found if isinstance(found, str) else found[0])


def read_annotations(source: Source) -> CocoFile:
    """Reads and checks the boxes of a source, or of the whole set that a split is part of."""
    return _read_annotations(json.dumps({**source, "split": None}, sort_keys=True))


@functools.lru_cache(maxsize=2)
def _read_annotations(key: str) -> CocoFile:
    source = json.loads(key)
    if "json_file" in source:
        return CocoFile(source["json_file"], source["image_root"])
    file = origin_of(source)
    if "shards" in source:
        part = read_part(file, source["subset"])
        lists = {key: part[key] for key in ("images", "annotations", "categories")}
        converted = Converted()
        converted.lists = lists
        return CocoFile(file, f"{PREFIX}{file}", converted=converted)
    convert = next(row.convert for row in FORMATS if row.key in source)
    assert convert is not None, source
    converted = convert(file, source["subset"], source.get("classes"))
    root = file if os.path.isdir(file) else os.path.dirname(file)
    return CocoFile(file, root, converted=converted)


def forget_annotations() -> None:
    """Clears the cache of ``read_annotations``, so that files are read again."""
    _read_annotations.cache_clear()
    read_part.cache_clear()


def register_source(
    name: str, source: Source, *, split: Mapping[str, Any] | None = None
) -> CocoFile | None:
    """Checks and registers a set, replaces one of the same name, and returns its annotations.

    The metadata keep ``source``. ``split`` is the content of the file in ``source["split"]``; None
    reads it. Raises a ``UserError`` if a file or folder is missing or broken.
    """
    forget_source(name)
    keep = annotations = None
    if part := source.get("split"):
        keep = frozenset((split or read_split(part["file"]))[part["part"]])
    if "image_folders" in source:
        for folder in source["image_folders"]:
            check_image_folder(folder)
        register_image_folders(
            name, source["image_folders"], labelled=source["labelled"], keep=keep
        )
    elif "shards" in source and not has_boxes(source):
        register_shards(name, source, keep)
    else:
        annotations = _register_annotated(name, source, keep)
    MetadataCatalog.get(name).source = source
    return annotations


def _register_annotated(name: str, source: Source, keep: Collection[str] | None) -> CocoFile | None:
    origin = origin_of(source)
    if not source["labelled"]:
        if "json_file" in source:
            files = origin, source["image_root"]
        else:
            find_images = next(row.list_images for row in FORMATS if row.key in source)
            assert find_images is not None, source
            paths = find_images(origin, source["subset"])
            images = [{"id": i, "file_name": path} for i, path in enumerate(paths, start=1)]
            files = _write_json(name, origin, {"images": images}), os.sep
        load_coco_images(*files)  # raises any error now
        register_coco_images(name, *files)
        return None
    annotations = read_annotations(source)
    check_coco_file(annotations)
    files = origin, annotations.image_root
    if keep is not None or "json_file" not in source:
        lists = annotations.keep(keep)
        if "shards" in source:
            named = [{**one, "file_name": locate_image(one)} for one in lists["images"]]
            lists = {**lists, "images": named}
        files = _write_json(name, origin, lists), annotations.image_root
    register_coco_json(name, *files)
    ids = {category: index for index, category in enumerate(annotations.category_ids)}
    MetadataCatalog.get(name).set(
        thing_classes=list(annotations.class_names), thing_dataset_id_to_contiguous_id=ids
    )
    return annotations


def forget_source(name: str) -> None:
    """Removes a registered set, if the name has one."""
    if name in DatasetCatalog:
        DatasetCatalog.remove(name)
    if name in MetadataCatalog.list():
        MetadataCatalog.remove(name)


def split_source(source: Source, *, fraction: float, seed: int) -> dict[str, Any]:
    """Divides the images of a source, named relative to its folder; see ``split_names``."""
    if "image_folders" in source:
        (folder,) = source["image_folders"]
        records, _ = load_image_folders([folder], labelled=True)
        names = [os.path.relpath(record["file_name"], folder) for record in records]
        groups = [record["label"] for record in records]
    elif "shards" in source and not has_boxes(source):
        images = read_part(source["shards"], source["subset"])["images"]
        names = [image["file_name"] for image in images]
        groups = [image["label"] for image in images]
    else:
        annotations = read_annotations(source)
        check_coco_file(annotations)
        names = [image["file_name"] for image in annotations.images]
        groups = group_by_rarest_class(annotations)
    return split_names(names, groups, fraction=fraction, seed=seed)


@functools.cache
def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="qbheat_data_")  # until the process ends


def _write_json(name: str, origin: str, content: Mapping[str, Any]) -> str:
    """Writes annotations to a temporary file, which Detectron2 reads; returns its path."""
    words = re.sub(r"\W+", "_", f"{name} {Path(origin).name}")
    path = Path(_temporary_folder().name) / f"{words[-100:]}.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    return str(path)
