# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Reads the annotations of sources, and registers sources with Detectron2."""

import functools
import json
import os
import re
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from detectron2.data import DatasetCatalog, MetadataCatalog

from qbheat_det.data.shards import PREFIX, has_boxes, locate_image, read_part

from .coco import check_coco_file, load_coco_images, register_coco_images, register_coco_json
from .coco_file import CocoFile, Converted
from .formats import FORMATS, Source, origin_of
from .image_folder import (
    check_image_folder,
    load_image_folders,
    register_image_folders,
    register_shards,
)
from .splits import group_by_rarest_class, read_split, split_names


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
    converted = convert(source)
    root = source.get("image_root") or (file if os.path.isdir(file) else os.path.dirname(file))
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
            paths = find_images(source)
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
