# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Recognises, checks and registers annotation files in COCO's format."""

import json
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.datasets import register_coco_instances

from qbheat_det.core.errors import UserError
from qbheat_det.core.text import join_first
from qbheat_det.data.checks import raise_first

from .coco_file import CocoFile

logger = logging.getLogger(__name__)
_FILE_NAME = re.compile(r'"file_name"\s*:\s*("(?:[^"\\]|\\.)*")')

_COCO = {
    "train": ("annotations/instances_train*.json", "train/_annotations.coco.json"),
    "whole": ("annotations.json", "_annotations.coco.json"),
    "val": ("annotations/instances_val*.json", "val*/_annotations.coco.json"),
}

PathLike = str | os.PathLike[str]


def register_coco_json(name: str, json_file: PathLike, image_root: PathLike) -> None:
    """Registers an annotation file; raises a ``UserError`` if the name has other files."""
    root = str(image_root) if "://" in str(image_root) else os.path.abspath(image_root)
    paths = os.path.abspath(json_file), root
    if not _is_registered(name, *paths):
        register_coco_instances(name, {}, *paths)


def register_coco_images(
    name: str,
    json_file: PathLike,
    image_root: PathLike,
    *,
    prepare: Callable[[], object] | None = None,
) -> None:
    """Registers the images of an annotation file without their annotations, for pre-training.

    The file is read when the set is first loaded, after ``prepare`` has created it. It may list
    images alone. Registering the same files again does nothing; other files under the same name
    raise a ``UserError``.
    """
    paths = os.path.abspath(json_file), os.path.abspath(image_root)
    if _is_registered(name, *paths, unlabelled=True):
        return

    def load() -> list[dict[str, Any]]:
        if prepare is not None:
            prepare()
        return load_coco_images(*paths)

    DatasetCatalog.register(name, load)
    MetadataCatalog.get(name).set(
        json_file=paths[0],
        image_root=paths[1],
        unlabelled=True,
        evaluator_type="reconstruction",
        drawn_on_first_use=prepare is not None,  # json_file may not exist before
    )


def load_coco_images(json_file: PathLike, image_root: PathLike) -> list[dict[str, Any]]:
    """Returns ``file_name`` and ``image_id`` of every image, sorted by id.

    Raises a ``UserError`` if the file is not in COCO's format, ids repeat, or a file is missing.
    """
    file = CocoFile(str(json_file), str(image_root), needed=("images",))
    raise_first(file.errors)
    return [
        {"file_name": os.path.join(image_root, image["file_name"]), "image_id": image["id"]}
        for image in sorted(file.images, key=lambda image: image["id"])
    ]


def check_coco_file(content: CocoFile) -> None:
    """Logs the warnings of annotations; raises a ``UserError`` for their first error."""
    raise_first(content.errors)
    for warning in content.warnings:
        logger.warning(warning)


def check_same_classes(train: CocoFile, val: CocoFile) -> None:
    """Raises a ``UserError`` unless two annotation files have the same classes in one order."""
    if train.class_names == val.class_names:
        return
    files = f"'{train.json_file}' and '{val.json_file}'"
    for one, other in ((train, val), (val, train)):
        missing = [name for name in one.class_names if name not in other.class_names]
        if missing:
            lacks = f"'{other.json_file}' lacks {join_first(map(repr, missing))}"
            raise UserError(f"the categories of {files} differ: {lacks}")
    raise UserError(
        f"the categories of {files} have the same names in another order of ids: "
        f"{join_first(map(repr, train.class_names))} against "
        f"{join_first(map(repr, val.class_names))}"
    )


def is_coco(path: Path) -> bool:
    """Returns whether a path is a json, or a folder with an annotation file in a usual place."""
    return path.suffix.lower() == ".json" or any(_find_json(path, part) for part in _COCO)


def open_coco(path: Path, image_root: str = "", likely_root: str = "") -> list[dict[str, Any]]:
    """Returns the sources of a json or folder: to train on, and perhaps to evaluate on."""
    files = [path]
    if path.is_dir():
        files = [file for part in _COCO if (file := _find_json(path, part))][:2]
    return [_locate_images(file, image_root, likely_root) for file in files]


def _find_json(root: Path, part: str) -> Path | None:
    files = [path for pattern in _COCO[part] for path in sorted(root.glob(pattern))]
    if len(files) > 1:
        names = " and ".join(str(path.relative_to(root)) for path in files)
        raise UserError(f"'{root}' has {names}: name one of them")
    return files[0] if files else None


def _locate_images(json_file: Path, given: str, likely: str) -> dict[str, Any]:
    """Returns the source of a COCO json, with the folder of its first image.

    ``given`` is the folder, if it is known. ``likely`` is tried before the folders beside the file.
    Raises a ``UserError`` if no folder is found.
    """
    above, subset = json_file.parent.parent, json_file.stem.removeprefix("instances_")
    beside = [json_file.parent / "images", above / "images", json_file.parent]
    beside += [above / "images" / subset, above / subset, json_file.parent / subset]
    folders = [*([Path(likely).absolute()] if likely else []), *beside]
    first = "" if given else _read_first_name(json_file)
    if given or not first:  # a broken file is reported when it is read
        folders = [Path(given or json_file.parent).absolute()]
    elif holding := [folder for folder in folders if (folder / first).is_file()]:
        folders = holding
    else:  # one image may be missing
        folders = [folder for folder in folders[: len(folders) - 4] if folder.is_dir()]
    if not folders:
        raise UserError(
            f"the images of '{json_file}', such as '{first}', are not beside it: name their folder "
            "with --images, or of --val with --val-images"
        )
    return {"json_file": str(json_file), "image_root": str(folders[0]), "labelled": True}


def _read_first_name(json_file: Path) -> str:
    """Returns the first ``file_name`` without reading the whole file."""
    text = ""
    with open(json_file, encoding="utf-8", errors="replace") as file:
        while chunk := file.read(1 << 20):
            text += chunk
            if match := _FILE_NAME.search(text):
                try:
                    return str(json.loads(match[1]))
                except ValueError:
                    return ""
    return ""


def _is_registered(name: str, json_file: str, image_root: str, *, unlabelled: bool = False) -> bool:
    """Returns whether a name has these files; raises a ``UserError`` if it has others."""
    if name not in DatasetCatalog:
        return False
    known = MetadataCatalog.get(name)
    paths = [
        path and path if "://" in path else os.path.abspath(path)
        for path in (known.get("json_file"), known.get("image_root"))
    ]
    if paths != [json_file, image_root] or known.get("unlabelled", False) != unlabelled:
        raise UserError(
            f"the data set name '{name}' is already registered with '{known.get('json_file')}'; "
            f"choose another name for '{json_file}' with images in '{image_root}'"
        )
    return True
