# Copyright (c) qbheat_det contributors. Apache-2.0.
"""COCO-format data of one's own: registering it, and checking it before hours of training.

What stops a run, or silently spoils it, is an error: one sentence that names the file and the
id. What Detectron2 copes with, and COCO's own files contain, is a warning with a count.
"""

import logging
import os
from dataclasses import dataclass
from operator import itemgetter

import numpy as np
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.datasets import register_coco_instances

from qbheat_det.core.errors import UserError

from .coco_file import CocoFile, Entry, quote
from .coco_shapes import has_area, has_polygon, keep_boxes, keep_keypoints, keep_segmentations
from .faults import Fault, raise_first

logger = logging.getLogger(__name__)

PathLike = str | os.PathLike[str]

_PLURAL = {"image": "images", "category": "categories"}


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
            twice or point to nothing; sizes, boxes or masks make no sense; no image, category
            or box. The sentence is that of the first fault and counts the others.
    """
    content = read_coco_json(json_file, image_root)
    raise_first(content.faults)
    for warning in content.summary.warnings:
        logger.warning(warning)
    return content.summary


@dataclass(frozen=True)
class CocoContent:
    """An annotation file, taken apart into what is sound and what is not.

    Attributes:
        images: entries without a fault, as they stand in the file.
        annotations: those of sound images and categories that have no fault themselves.
        categories: entries without a fault.
        summary: counts of what is sound, and warnings.
        faults: one for each thing that is wrong.
    """

    images: list[Entry]
    annotations: list[Entry]
    categories: list[Entry]
    summary: CocoSummary
    faults: tuple[Fault, ...]


def read_coco_json(json_file: PathLike, image_root: PathLike) -> CocoContent:
    """Reads an annotation file and finds everything that is wrong with it.

    Raises:
        UserError: nothing can be said of single entries: the file or the image folder does not
            exist, the file is not JSON, or not COCO, or has no images or no categories.
    """
    file = CocoFile(str(json_file))
    content = file.read()
    for key in ("images", "categories"):
        if not content[key]:
            file.fail(f"the list '{key}' is empty")
    categories = _check_categories(file, content["categories"])
    images = file.with_sizes(file.with_ids(content["images"], "image"))
    images = file.with_files(images, str(image_root))
    file.warn_if_repeated([image["file_name"] for image in images], "image file names")
    annotations = file.with_ids(content["annotations"], "annotation")
    for kind, sound in (("image", images), ("category", categories)):
        known = _ids(content[_PLURAL[kind]])
        annotations = file.with_known(annotations, kind, known, _ids(sound))
    size_of = {image["id"]: (image["width"], image["height"]) for image in images}
    annotations = file.with_flags(annotations)
    annotations = keep_keypoints(file, keep_segmentations(file, annotations, size_of))
    annotations = keep_boxes(file, annotations, size_of)
    summary = _summarise(file, images, annotations, categories)
    return CocoContent(images, annotations, categories, summary, tuple(file.faults))


def _check_categories(file: CocoFile, entries: list[Entry]) -> list[Entry]:
    """Returns the sound categories in contiguous order: by id, as Detectron2 sorts them."""
    entries = file.with_ids(entries, "category")
    entries = file.with_type(entries, "category", "name", str, "a text")
    good = [_can_be_written(entry["name"]) for entry in entries]
    reason = "the name holds half a character (a lone surrogate), which no file can store"
    entries = file.keep(entries, "category", good, "category without a sound name", reason)
    file.warn_if_repeated([entry["name"] for entry in entries], "category names")
    return sorted(entries, key=itemgetter("id"))


def _summarise(
    file: CocoFile, images: list[Entry], annotations: list[Entry], categories: list[Entry]
) -> CocoSummary:
    crowds = np.array([bool(a.get("iscrowd", 0)) for a in annotations], dtype=bool)
    usable = has_area(annotations) & has_polygon(annotations) & ~crowds
    used = [annotation for annotation, is_used in zip(annotations, usable, strict=True) if is_used]
    if not used and not file.faults:
        reason = "there is no box to train on or to evaluate with"
        file.faults.append(Fault("no boxes", file.path, reason))
    if any(annotation["id"] == 0 for annotation in annotations):
        file.warn("annotation id 0 means 'no match' to pycocotools; number annotations from 1")
    present = {annotation["category_id"] for annotation in used}
    without = [entry["name"] for entry in categories if entry["id"] not in present]
    if without and used:
        file.warn(f"{len(without)} of {len(categories)} categories have no box: {quote(without)}")
    return CocoSummary(
        json_file=file.path,
        num_images=len(images),
        num_images_without_boxes=len(images) - len({annotation["image_id"] for annotation in used}),
        num_boxes=len(used),
        num_crowds=int(crowds.sum()),
        class_names=tuple(entry["name"] for entry in categories),
        category_ids=tuple(entry["id"] for entry in categories),
        warnings=tuple(file.warnings),
    )


def _ids(entries: list[Entry]) -> set[int]:
    return {entry["id"] for entry in entries if type(entry.get("id")) is int}


def _can_be_written(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
