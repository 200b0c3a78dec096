# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Reads and splits the annotations of sources, and registers data sets with Detectron2."""

import functools
import json
import os
import random
import re
import tempfile
from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.datasets import register_coco_instances

from qbheat_det.core.errors import UserError
from qbheat_det.data.checks import raise_first

from .coco_file import CocoFile
from .conversion import MISSING_IMAGE
from .formats import FORMATS, Source, origin_of
from .image_folder import (
    PathLike,
    check_image_folder,
    is_new,
    load_image_folders,
    register_image_folders,
)

SPLIT_FILE = "split.json"


def register_coco_json(name: str, json_file: PathLike, image_root: PathLike) -> None:
    """Registers a COCO file. Raises a ``UserError`` if the name is in use for other files."""
    path, root = os.path.abspath(json_file), os.path.abspath(image_root)
    if is_new(name, json_file=path, image_root=root, unlabelled=None):
        register_coco_instances(name, {}, path, root)


def register_coco_images(name: str, json_file: PathLike, image_root: PathLike) -> None:
    """Registers the images of a COCO file without their annotations, for pre-training.

    The file is read when the set is first loaded, and only needs the list "images". Registering the
    same files again does nothing. Raises a ``UserError`` if the name is in use for other files.
    """
    path, root = os.path.abspath(json_file), os.path.abspath(image_root)
    if not is_new(name, json_file=path, image_root=root, unlabelled=True):
        return
    DatasetCatalog.register(name, lambda: load_coco_images(path, root))
    MetadataCatalog.get(name).set(
        json_file=path, image_root=root, unlabelled=True, evaluator_type="reconstruction"
    )


def load_coco_images(json_file: PathLike, image_root: PathLike) -> list[dict[str, Any]]:
    """Returns ``file_name`` and ``image_id`` of every image, sorted by id.

    Raises a ``UserError`` if the file is not in COCO's format, an id occurs more than once, or an
    image is missing.
    """
    file = CocoFile(str(json_file), str(image_root), needed=("images",))
    raise_first(file.errors)
    return [
        {"file_name": os.path.join(image_root, image["file_name"]), "image_id": image["id"]}
        for image in sorted(file.images, key=lambda image: image["id"])
    ]


def read_annotations(source: Source) -> CocoFile:
    """Reads and checks the boxes of all images of a source, also those that its split omits."""
    return _read_annotations(json.dumps({**source, "split": None}, sort_keys=True))


@functools.lru_cache(maxsize=2)
def _read_annotations(key: str) -> CocoFile:
    source = json.loads(key)
    if "json_file" in source:
        return CocoFile(source["json_file"], source["image_root"])
    file = origin_of(source)
    root = source.get("image_root") or (file if os.path.isdir(file) else os.path.dirname(file))
    converted = next(row.convert(source) for row in FORMATS.values() if row.key in source)
    return CocoFile(file, root, converted=converted)


def forget_annotations() -> None:
    """Clears the cache of ``read_annotations``, so that changed files are read again."""
    _read_annotations.cache_clear()


def register_source(
    name: str, source: Source, *, split: Mapping[str, Any] | None = None
) -> CocoFile | None:
    """Checks a source, registers it as a data set, and returns its annotations.

    Returns None if the source has no boxes, or if they are not used (``source["labelled"]``). A
    data set with the same name is replaced. The metadata contain ``source``. ``split`` is the
    content of the split file that ``source["split"]`` names; None reads the file. Raises a
    ``UserError`` if a file or folder is missing or broken.
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
            annotations = read_annotations(source)
            raise_first([one for one in annotations.errors if one.kind == MISSING_IMAGE])
            images = {"images": annotations.images}
            files = _write_json(name, origin, images), annotations.image_root
        load_coco_images(*files)  # raises errors now instead of at the first load
        register_coco_images(name, *files)
        return None
    annotations = read_annotations(source)
    annotations.check()
    files = origin, annotations.image_root
    if keep is not None or "json_file" not in source:
        files = _write_json(name, origin, annotations.keep(keep)), annotations.image_root
    register_coco_json(name, *files)
    ids = {category: index for index, category in enumerate(annotations.category_ids)}
    MetadataCatalog.get(name).set(
        thing_classes=list(annotations.class_names), thing_dataset_id_to_contiguous_id=ids
    )
    return annotations


def forget_source(name: str) -> None:
    """Removes a data set if it is registered."""
    if name in DatasetCatalog:
        DatasetCatalog.remove(name)
    if name in MetadataCatalog.list():
        MetadataCatalog.remove(name)


def split_source(source: Source, *, fraction: float, seed: int) -> dict[str, Any]:
    """Divides the images of a source, and returns the content of ``split.json``.

    The keys are "seed", "fraction", "train" and "val". The last two list names of images. For the
    arguments, see ``choose_val``. Raises a ``UserError`` if there are too few images.
    """
    groups: list[Hashable]
    if "image_folders" in source:
        folders = source["image_folders"]
        records, _ = load_image_folders(folders, labelled=source["labelled"])
        base = folders[0] if len(folders) == 1 else os.path.commonpath(folders)
        names = [os.path.relpath(record["file_name"], base) for record in records]
        groups = [record["label"] for record in records]
    else:
        annotations = read_annotations(source)
        annotations.check()
        names = [image["file_name"] for image in annotations.images]
        groups = group_by_rarest_class(annotations)
    chosen = choose_val(groups, fraction=fraction, seed=seed)
    if not chosen or len(chosen) == len(names):
        raise UserError(
            f"a share of {fraction:g} of {len(names)} images cannot be held out: pass a "
            "validation set with --val, or disable evaluation with DATASETS.VAL_FRACTION 0"
        )
    parts: dict[str, list[str]] = {"train": [], "val": []}
    for index, name in enumerate(names):
        parts["val" if index in chosen else "train"].append(name)
    return {"seed": seed, "fraction": fraction, **parts}


@functools.cache
def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="qbheat_data_")  # removed when the process ends


def _write_json(name: str, origin: str, content: Mapping[str, Any]) -> str:
    """Writes annotations to a temporary file for Detectron2, and returns its path."""
    words = re.sub(r"\W+", "_", f"{name} {Path(origin).name}")
    path = Path(_temporary_folder().name) / f"{words[-100:]}.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    return str(path)


def choose_val(groups: Sequence[Hashable], *, fraction: float, seed: int) -> set[int]:
    """Returns the indices of the images to hold out, which depend only on the arguments.

    ``groups`` (N,) has the group of each image. ``fraction``, in (0, 1), of each group is held out,
    up to a difference of one image. An image that is alone in its group is never held out.
    """
    generator = random.Random(f"{seed} hold out")
    sizes = Counter(groups)
    order = sorted(
        (repr(group), generator.random(), index)
        for index, group in enumerate(groups)
        if sizes[group] > 1
    )
    # At least one image is held out, if there are two.
    start = max(generator.random(), 1 - len(order) * fraction)
    # For a fraction of 1/5, this is every fifth image in the order of groups, from a random start.
    return {
        index
        for place, (_, _, index) in enumerate(order)
        if int((place + 1) * fraction + start) > int(place * fraction + start)
    }


def group_by_rarest_class(annotations: CocoFile) -> list[Hashable]:
    """Returns, for each image, which of its classes occurs in the fewest images.

    An image without boxes gets None. Crowd boxes do not count. Of equally rare classes, the one
    with the lower id is returned.
    """
    classes: dict[int, set[int]] = {image["id"]: set() for image in annotations.images}
    for entry in annotations.annotations:
        if not entry.get("iscrowd", 0):
            classes[entry["image_id"]].add(entry["category_id"])
    counts = Counter(class_id for own in classes.values() for class_id in own)
    return [
        min(own, key=lambda class_id: (counts[class_id], class_id)) if own else None
        for own in classes.values()
    ]


def read_split(path: str | Path) -> dict[str, Any]:
    """Returns the content of a ``split.json``, or raises a ``UserError``."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        parts = [content["train"], content["val"]]
        if all(isinstance(name, str) for part in parts for name in part):
            return dict(content)
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise UserError(f'\'{path}\' does not list the images of a split by "train" and "val"')
