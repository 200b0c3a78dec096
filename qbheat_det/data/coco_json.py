# Copyright (c) qbheat_det contributors. Apache-2.0.
"""COCO-format data of one's own: registering it, and checking it before hours of training.

What stops a run, or silently spoils it, is an error: one sentence that names the file and the
id. What Detectron2 copes with, and COCO's own files contain, is a warning with a count.
"""

import logging
import os
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.datasets import register_coco_instances

from qbheat_det.errors import UserError

from .coco_file import CocoFile, quote

logger = logging.getLogger(__name__)

PathLike = str | os.PathLike[str]


@dataclass(frozen=True)
class CocoSummary:
    """What an annotation file holds.

    Attributes:
        json_file: the annotation file.
        num_images: images, with boxes or without.
        num_images_without_boxes: images that no annotation names, or only crowds.
        num_boxes: boxes with an area that are no crowds: what is trained on.
        num_crowds: annotations with ``iscrowd`` 1, which are not trained on.
        class_names: in contiguous order, which is the order of the ids.
        category_ids: ids in the file, in the same order; may have holes.
        warnings: sentences about what was found odd but can be worked with.
    """

    json_file: str
    num_images: int
    num_images_without_boxes: int
    num_boxes: int
    num_crowds: int
    class_names: tuple[str, ...]
    category_ids: tuple[int, ...]
    warnings: tuple[str, ...]


def register_coco_json(name: str, json_file: PathLike, image_root: PathLike) -> None:
    """Registers an annotation file with Detectron2; it is read when the set is first loaded.

    Registering a name again with the same files does nothing.

    Raises:
        UserError: the name is taken by other files.
    """
    paths = os.path.abspath(json_file), os.path.abspath(image_root)
    if name not in DatasetCatalog:
        register_coco_instances(name, {}, *paths)
        return
    metadata = MetadataCatalog.get(name)
    known = metadata.get("json_file"), metadata.get("image_root")
    if tuple(path and os.path.abspath(path) for path in known) != paths:
        raise UserError(
            f"the data set name '{name}' is already registered with '{known[0]}' and images in "
            f"'{known[1]}'; choose another name for '{paths[0]}' with '{paths[1]}'"
        )


def check_same_classes(train: CocoSummary, val: CocoSummary) -> None:
    """Checks that two annotation files mean the same by class 0, 1, 2, …

    Raises:
        UserError: names are missing in one of them, or their ids put them in another order.
    """
    if train.class_names == val.class_names:
        return
    files = f"'{train.json_file}' and '{val.json_file}'"
    for one, other in ((train, val), (val, train)):
        missing = [name for name in one.class_names if name not in other.class_names]
        if missing:
            raise UserError(
                f"the categories of {files} differ: '{other.json_file}' lacks {quote(missing)}"
            )
    raise UserError(
        f"the categories of {files} have the same names in another order of ids: "
        f"{quote(train.class_names)} against {quote(val.class_names)}"
    )


def check_coco_json(json_file: PathLike, image_root: PathLike) -> CocoSummary:
    """Checks an annotation file and that its images exist, and says what it holds.

    Image files are looked up in the listings of their folders and not opened. Warnings are
    logged and returned.

    Raises:
        UserError: file or images are missing; the file is not JSON or not COCO; ids occur
            twice or point to nothing; sizes or boxes make no sense; no image, category or box.
    """
    file = CocoFile(str(json_file))
    content = file.read()
    images, annotations = content["images"], content["annotations"]
    for key in ("images", "categories"):
        if not content[key]:
            file.fail(f"the list '{key}' is empty")
    class_names, category_ids = _classes(file, content["categories"])
    image_ids, sizes = file.ids(images, "image"), file.sizes(images)
    file.image_files(images, str(image_root))
    annotation_ids = file.ids(annotations, "annotation")
    image_of = file.references(annotations, "image", image_ids)
    category_of = file.references(annotations, "category", category_ids)
    crowds = file.crowds(annotations)
    valid = file.segmentations(annotations) & file.boxes(annotations, sizes[image_of])
    usable = valid & ~crowds
    if not usable.any():
        file.fail("there is no box to train on or to evaluate with")
    if 0 in annotation_ids:
        file.warn("annotation id 0 means 'no match' to pycocotools; number annotations from 1")
    boxes_of = np.bincount(category_of[usable], minlength=len(category_ids))
    without = [name for name, count in zip(class_names, boxes_of, strict=True) if not count]
    if without:
        file.warn(f"{len(without)} of {len(class_names)} categories have no box: {quote(without)}")
    for warning in file.warnings:
        logger.warning(warning)
    return CocoSummary(
        json_file=file.path,
        num_images=len(images),
        num_images_without_boxes=len(images) - len(np.unique(image_of[usable])),
        num_boxes=int(usable.sum()),
        num_crowds=int(crowds.sum()),
        class_names=class_names,
        category_ids=category_ids,
        warnings=tuple(file.warnings),
    )


def _classes(
    file: CocoFile, categories: list[dict[str, Any]]
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Returns names and ids in contiguous order: by id, as Detectron2 sorts them."""
    ids = file.ids(categories, "category")
    names = file.column(categories, "category", "name", str, "a text")
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        file.warn(f"{len(twice)} category names occur more than once: {quote(twice)}")
    order = sorted(range(len(ids)), key=ids.__getitem__)
    return tuple(names[i] for i in order), tuple(ids[i] for i in order)
