# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What ``--data`` may name, recognised by its files: where its images and boxes are.

A source is what JSON can hold, so that a run can record it: ``json_file`` with ``image_root``;
``yolo_file``, ``voc_folder`` or ``shards`` (their address) with ``subset``; or ``image_folders``.
Further ``labelled``, whether
boxes or the names of folders are read; ``classes`` for VOC, which lists none itself; and ``split``,
if it is a part of the images that ``split.json`` lists.
"""

import functools
import json
import os
import re
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

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
    register_shards,
)

from .coco import (
    check_coco_file,
    load_coco_images,
    locate_images,
    register_coco_images,
    register_coco_json,
)
from .coco_file import CocoFile, Converted
from .image_folder import (
    IMAGE_SUFFIXES,
    check_image_folder,
    list_images,
    load_image_folders,
    register_image_folders,
)
from .splits import group_by_rarest_class, read_split, split_names
from .voc import convert_voc, find_voc_list
from .yolo import convert_yolo, list_yolo_images, read_data_yaml

Source = dict[str, Any]
Kind = Literal["coco", "yolo", "voc", "classes", "images"]

_VAL_NAMES = ("val", "valid", "validation", "test")
_COCO = {
    "train": ("annotations/instances_train*.json", "train/_annotations.coco.json"),
    "whole": ("annotations.json", "_annotations.coco.json"),
    "val": ("annotations/instances_val*.json", "val*/_annotations.coco.json"),
}
_YAMLS = ("data.yaml", "data.yml", "dataset.yaml")
_FORMATS = (
    "a COCO json, a folder with annotations/instances_train.json, a data.yaml of YOLO, a folder of "
    "Pascal VOC with Annotations/ and JPEGImages/, or a folder with a folder of images for each "
    "class"
)


@dataclass(frozen=True)
class DataSource:
    """What a path names: its format, and the sources to train and to evaluate on."""

    kind: Kind
    train: Source
    val: Source | None = None


def find_kind(path: str) -> Kind:
    """Returns the format of a file or a folder, by names alone; a ``UserError`` if it has none."""
    if are_shards(path):
        packed: dict[str, Kind] = {"boxes": "coco", "classes": "classes", "images": "images"}
        return packed[read_index(absolute(path))["kind"]]
    if not os.path.exists(path):
        raise UserError(f"'{path}' does not exist")
    root = Path(path)
    if root.is_file():
        kinds: dict[str, Kind] = {".json": "coco", ".yaml": "yolo", ".yml": "yolo"}
        if kind := kinds.get(root.suffix.lower()):
            return kind
    elif any(_find_json(root, part) for part in _COCO):
        return "coco"
    elif any((root / name).is_file() for name in _YAMLS):
        return "yolo"
    elif (root / "Annotations").is_dir() and (root / "JPEGImages").is_dir():
        return "voc"
    elif any(entry.is_dir() and not entry.name.startswith(".") for entry in os.scandir(root)):
        return "classes"
    elif any(entry.suffix.lower() in IMAGE_SUFFIXES for entry in root.iterdir()):
        raise UserError(
            f"'{path}' holds images and no annotations: --data takes {_FORMATS}; --images takes "
            "images without labels, for pre-training"
        )
    raise UserError(f"'{path}' is nothing that --data takes: {_FORMATS}")


def open_source(path: str, image_root: str = "", *, likely_root: str = "") -> DataSource:
    """Returns where the images and boxes of a path are, or raises a ``UserError``.

    ``image_root`` is the folder of a COCO json's images; by default it is searched beside the file,
    from ``likely_root`` on.
    """
    kind, root = find_kind(path), Path(path).absolute()
    if are_shards(path) and not image_root:
        if kind == "images":
            raise UserError(f"the shards at '{path}' have no labels: name them with --images")
        return _open_shards(kind, path)
    if image_root and (kind != "coco" or are_shards(path)):
        raise UserError(f"'{path}' is no COCO json, so its images need no folder '{image_root}'")
    if kind == "classes":
        return _open_classes(root)
    if kind == "yolo":
        file = root if root.is_file() else next(f for n in _YAMLS if (f := root / n).is_file())
        source = {"yolo_file": str(file), "labelled": True}
        has_val = "val" in read_data_yaml(file).subsets
        return _make(kind, source, "train", "val" if has_val else None)
    if kind == "voc":
        source = {"voc_folder": str(root), "labelled": True}
        train, val = (find_voc_list(root, subset) for subset in ("train", "val"))
        return _make(kind, source, "train" if train else "all", "val" if train and val else None)
    if root.is_file():
        return DataSource(kind, locate_images(root, image_root, likely_root))
    files = [found for part in _COCO if (found := _find_json(root, part))]
    sources = [locate_images(file, image_root, likely_root) for file in files]
    return DataSource(kind, sources[0], sources[1] if len(sources) > 1 else None)


def open_images(paths: Sequence[str]) -> DataSource:
    """Returns the source of images without labels: of folders, or of one set of shards."""
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
    return _make(kind, source, "train", "val" if has_val else None)


def _make(kind: Kind, source: Source, train: str, val: str | None) -> DataSource:
    return DataSource(kind, {**source, "subset": train}, {**source, "subset": val} if val else None)


def _open_classes(root: Path) -> DataSource:
    parts = {entry.name for entry in root.iterdir() if entry.is_dir()}
    val = next((name for name in _VAL_NAMES if name in parts), None)
    # Vehicles have a class "train", too.
    if val is None or "train" not in parts or parts - {"train", *_VAL_NAMES}:
        return DataSource("classes", _class_folder(root))
    return DataSource("classes", _class_folder(root / "train"), _class_folder(root / val))


def _class_folder(folder: Path) -> Source:
    return {"image_folders": [str(folder)], "labelled": True}


def _find_json(root: Path, part: str) -> Path | None:
    found = [path for pattern in _COCO[part] for path in sorted(root.glob(pattern))]
    if len(found) > 1:
        names = " and ".join(str(path.relative_to(root)) for path in found)
        raise UserError(f"'{root}' has {names}: name the file that is meant")
    return found[0] if found else None


def origin_of(source: Source) -> str:
    """Returns the file or folder of a source, as errors name it."""
    keys = ("json_file", "yolo_file", "voc_folder", "shards", "image_folders")
    found = next(source[key] for key in keys if key in source)
    return str(found if isinstance(found, str) else found[0])


def read_annotations(source: Source) -> CocoFile:
    """Reads and checks the boxes of a source; those of its whole, if it is a part of a split."""
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
        return CocoFile(file, f"{PREFIX}{file}", converted=Converted(lists, {}, []))
    if "yolo_file" in source:
        converted, root = convert_yolo(file, source["subset"]), os.path.dirname(file)
    else:
        converted, root = convert_voc(file, source["subset"], source.get("classes")), file
    return CocoFile(file, root, converted=converted)


def forget_annotations() -> None:
    """Frees what ``read_annotations`` keeps, so that files are read again when they are needed."""
    _read_annotations.cache_clear()
    read_part.cache_clear()


def register_source(
    name: str, source: Source, *, split: Mapping[str, Any] | None = None
) -> CocoFile | None:
    """Checks and registers a set, in place of another of the same name; returns its annotations.

    ``source`` is kept in the metadata; ``split`` is what is in the file of ``source["split"]``,
    None reads it. Raises a ``UserError`` if a file or folder is missing or broken.
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
            files = _write_json(name, origin, {"images": _list_images(source)}), os.sep
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


def _list_images(source: Source) -> list[dict[str, Any]]:
    """Returns COCO's entries of the images of YOLO or VOC, whose labels are not looked at."""
    if "yolo_file" in source:
        paths, errors = list_yolo_images(read_data_yaml(source["yolo_file"]), source["subset"])
        raise_first(errors)
    else:
        paths = list_images(os.path.join(source["voc_folder"], "JPEGImages"))
    return [{"id": number, "file_name": path} for number, path in enumerate(paths, start=1)]


def forget_source(name: str) -> None:
    """Removes a registered set, if there is one of this name."""
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
    """Writes annotations for Detectron2 and the evaluation, which read files; returns the path."""
    words = re.sub(r"\W+", "_", f"{name} {Path(origin).name}")
    path = Path(_temporary_folder().name) / f"{words[-100:]}.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    return str(path)
