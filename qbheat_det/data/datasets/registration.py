# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Registers data sets with Detectron2, which reads them by their names."""

import functools
import json
import os
import re
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.datasets import load_coco_json

from qbheat_det.modeling.contracts import ANNOTATED_CLASSES

from .annotated import find_annotated, mentions_keys
from .annotations import Annotations
from .image_folder import PathLike, check_image_folder, is_new, register_image_folders
from .reading import read_annotations, read_data_set
from .source import Source


def register_source(
    name: str,
    source: Source,
    *,
    annotations: Annotations | None = None,
    keep: Collection[str] | None = None,
) -> None:
    """Registers a source as a data set. A data set with the same name is replaced.

    Args:
        name: name of the data set.
        source: the source. Its split is ignored.
        annotations: the content of a source with boxes; by default, ``read_annotations`` reads it.
        keep: names of the images to use; None for all.

    Raises:
        UserError: a file or folder is missing, or there are no boxes.
    """
    forget_source(name)
    if not source.has_boxes:
        for folder in source.folders:
            check_image_folder(folder)
        register_image_folders(name, source.folders, labelled=source.labelled, keep=keep)
        return
    annotations = annotations or read_annotations(source)
    if source.labelled:
        _register_boxes(name, source, annotations, keep)
        return
    records = list_image_records(annotations)
    DatasetCatalog.register(name, lambda: records)
    MetadataCatalog.get(name).set(unlabelled=True, evaluator_type="reconstruction")


def _register_boxes(
    name: str, source: Source, annotations: Annotations, keep: Collection[str] | None
) -> None:
    """Registers images with boxes as a COCO file, which is written if there is none."""
    annotations.check()
    path = annotations.original
    if keep is not None or not path:
        path = _write_json(name, source.path, annotations.keep(keep))
    register_coco_json(name, path, annotations.image_root)
    ids = {category: index for index, category in enumerate(annotations.category_ids)}
    MetadataCatalog.get(name).set(
        thing_classes=list(annotations.class_names),
        thing_dataset_id_to_contiguous_id=ids,
    )


def forget_source(name: str) -> None:
    """Removes a data set if it is registered."""
    if name in DatasetCatalog:
        DatasetCatalog.remove(name)
    if name in MetadataCatalog.list():
        MetadataCatalog.remove(name)


def _write_json(name: str, origin: str, content: Mapping[str, Any]) -> str:
    """Writes annotations to a temporary file for Detectron2, and returns its path."""
    words = re.sub(r"\W+", "_", f"{name} {Path(origin).name}")
    folder = tempfile.mkdtemp(dir=_temporary_folder().name)
    path = Path(folder) / f"{words[:100]}.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    return str(path)


@functools.cache
def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    """Returns the same folder in each call."""
    return tempfile.TemporaryDirectory(prefix="qbheat_data_")  # removed when the process ends


def register_coco_json(name: str, json_file: PathLike, image_root: PathLike) -> None:
    """Registers a COCO file. Raises a ``UserError`` if the name is in use for other files."""
    path = os.path.abspath(json_file)
    root = os.path.abspath(image_root)
    if not is_new(name, json_file=path, image_root=root, unlabelled=None):
        return
    DatasetCatalog.register(name, lambda: load_coco_records(path, root, name))
    MetadataCatalog.get(name).set(json_file=path, image_root=root, evaluator_type="coco")


def load_coco_records(json_file: str, image_root: str, name: str) -> list[dict[str, Any]]:
    """Returns the records of a COCO file, as Detectron2 reads them, with ``ANNOTATED_CLASSES``.

    A record has this key if not all classes are annotated in its image. ``name`` is that of the
    data set, whose metadata get the classes.
    """
    records: list[dict[str, Any]] = load_coco_json(json_file, image_root, name)
    if not mentions_keys(json_file):
        return records
    annotated = find_annotated(json.loads(Path(json_file).read_bytes()))
    index_of_id = MetadataCatalog.get(name).thing_dataset_id_to_contiguous_id
    for record in records:
        ids = annotated.get(record["image_id"])
        if ids is not None:
            record[ANNOTATED_CLASSES] = sorted(index_of_id[id_] for id_ in ids)
    return records


def register_coco_images(name: str, json_file: PathLike, image_root: PathLike) -> None:
    """Registers the images of a COCO file without their annotations, for pre-training.

    The file is read when the set is first loaded, and only needs the list "images". Registering the
    same files again does nothing. Raises a ``UserError`` if the name is in use for other files.
    """
    path = os.path.abspath(json_file)
    root = os.path.abspath(image_root)
    if not is_new(name, json_file=path, image_root=root, unlabelled=True):
        return
    DatasetCatalog.register(name, lambda: load_coco_images(path, root))
    MetadataCatalog.get(name).set(
        json_file=path, image_root=root, unlabelled=True, evaluator_type="reconstruction"
    )


def load_coco_images(json_file: PathLike, image_root: PathLike) -> list[dict[str, Any]]:
    """Returns ``file_name`` and ``image_id`` of every image, sorted by id.

    Raises a ``UserError`` if the file is not in COCO's format, or too many images are missing.
    """
    data_set = read_data_set(str(json_file), str(image_root), "coco", ())
    (annotations,) = data_set.parts.values()  # named "train" if the file is train.json
    annotations.account.check()
    return list_image_records(annotations)


def list_image_records(annotations: Annotations) -> list[dict[str, Any]]:
    """Returns ``file_name`` and ``image_id`` of every image, sorted by id."""
    records = []
    for image in sorted(annotations.images, key=lambda image: int(image["id"])):
        path = os.path.join(annotations.image_root, image["file_name"])
        records.append({"file_name": path, "image_id": image["id"]})
    return records
