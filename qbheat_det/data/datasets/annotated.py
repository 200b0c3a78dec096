# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Which classes are annotated in an image: all of their objects there are labelled.

By default, these are all classes of a COCO file. An entry in its list of images can name others:

- "annotated_category_ids" lists them. This key is ours.
- "neg_category_ids" and "not_exhaustive_category_ids" are those of LVIS (arXiv:1908.03195). In a
  file with the first key, an image's annotated classes are the negative ones, which it has no
  objects of, and those of its boxes. Classes that are not exhaustive are not among them.

An image with "not_exhaustive_category_ids" in a file without the other two keys has all classes but
these annotated.
"""

import mmap
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from qbheat_det.core.errors import UserError
from qbheat_det.core.text import join_first
from qbheat_det.data.checks import short

ANNOTATED_IDS = "annotated_category_ids"
NEGATIVE_IDS = "neg_category_ids"
NOT_EXHAUSTIVE_IDS = "not_exhaustive_category_ids"
KEYS = (ANNOTATED_IDS, NEGATIVE_IDS, NOT_EXHAUSTIVE_IDS)
_KEYS = frozenset(KEYS)
_MAX_CLASSES = 40  # in a line of the log

Entry = Mapping[str, Any]


def find_annotated(content: Mapping[str, Sequence[Entry]]) -> dict[int, frozenset[int]]:
    """Maps the ids of images to the ids of their annotated categories.

    Images in which all categories are annotated are left out.

    Args:
        content: COCO's lists "images", "annotations" and "categories".
    """
    images = [image for image in content["images"] if not _KEYS.isdisjoint(image)]
    if not images:
        return {}
    every_id = frozenset(category["id"] for category in content["categories"])
    if any(NEGATIVE_IDS in image for image in images):
        images = [complete_keys(image) for image in content["images"]]
    ids_of_boxes = _find_ids_of_boxes(content)
    annotated = {}
    for image in images:
        ids = select_annotated(image, ids_of_boxes[image["id"]], every_id)
        if ids != every_id:
            annotated[image["id"]] = ids
    return annotated


def _find_ids_of_boxes(content: Mapping[str, Sequence[Entry]]) -> dict[int, set[int]]:
    """Maps the ids of images to the ids of the categories of their boxes, which may be none."""
    ids_of_boxes: dict[int, set[int]] = defaultdict(set)
    for annotation in content.get("annotations", ()):
        ids_of_boxes[annotation["image_id"]].add(annotation["category_id"])
    return ids_of_boxes


def restore_annotated(
    content: Mapping[str, Sequence[Entry]], annotated: Mapping[int, frozenset[int]]
) -> list[dict[str, Any]]:
    """Returns the entries of images after boxes were added, removed or given another class.

    In files of LVIS, the classes of the boxes are annotated. So the keys change, in order that the
    annotated classes do not.

    Args:
        content: COCO's lists after the changes.
        annotated: result of ``find_annotated`` before the changes.
    """
    ids_of_boxes = _find_ids_of_boxes(content)
    restored = []
    for image in content["images"]:
        entry = dict(image)
        if NEGATIVE_IDS in image and image["id"] in annotated:
            present = ids_of_boxes[image["id"]]
            ids = annotated[image["id"]]
            others = {*image.get(NOT_EXHAUSTIVE_IDS, ()), *(present - ids)}
            entry[NEGATIVE_IDS] = sorted(ids - present)
            entry[NOT_EXHAUSTIVE_IDS] = sorted(others)
        restored.append(entry)
    return restored


def count_annotated(content: Mapping[str, Sequence[Entry]]) -> dict[str, int]:
    """Returns the number of images in which each class is annotated, by its name.

    Returns {} if all classes are annotated in all images. ``content`` has COCO's lists.
    """
    annotated = find_annotated(content)
    if not annotated:
        return {}
    counts = Counter(id_ for ids in annotated.values() for id_ in ids)
    num_complete = len(content["images"]) - len(annotated)
    return {entry["name"]: num_complete + counts[entry["id"]] for entry in content["categories"]}


def describe_annotated(num_annotated: Mapping[str, int], num_images: int) -> str:
    """Describes the result of ``count_annotated`` in one line."""
    counts = [f"{name} {count:,}" for name, count in num_annotated.items()]
    return f"of {num_images:,} images, annotated for {join_first(counts, _MAX_CLASSES)}"


def select_annotated(
    image: Entry, ids_of_boxes: Collection[int], every_id: frozenset[int]
) -> frozenset[int]:
    """Returns the ids of the annotated categories of an image.

    Args:
        image: the image's entry in COCO's list, after ``complete_keys`` in a file of LVIS.
        ids_of_boxes: ids of the categories of the image's boxes.
        every_id: ids of all categories.
    """
    if ANNOTATED_IDS in image:
        return every_id.intersection(image[ANNOTATED_IDS])
    ids = every_id
    if NEGATIVE_IDS in image:
        ids = every_id.intersection({*image[NEGATIVE_IDS], *ids_of_boxes})
    return ids.difference(image.get(NOT_EXHAUSTIVE_IDS, ()))


def complete_keys(image: Entry) -> dict[str, Any]:
    """Returns the entry of an image in a file of LVIS, with the key "neg_category_ids"."""
    if ANNOTATED_IDS in image or NEGATIVE_IDS in image:
        return dict(image)
    return {**image, NEGATIVE_IDS: []}


def check_keys(image: Entry, category_ids: Collection[int], where: str) -> None:
    """Checks the keys of an image that name its annotated classes.

    Args:
        image: the image's entry in COCO's list.
        category_ids: ids of all categories of the file.
        where: names the file and the image in the message.

    Raises:
        UserError: a key is no list of ids of categories, or an image has keys of both kinds.
    """
    for key in KEYS:
        ids = image.get(key, [])
        if not isinstance(ids, list) or not all(type(id_) is int for id_ in ids):
            raise UserError(f"{where}: '{key}' must be a list of category ids, not {short(ids)}")
        unknown = [id_ for id_ in ids if id_ not in category_ids]
        if unknown:
            raise UserError(
                f"{where}: '{key}' has {join_first(unknown)}, which 'categories' does not list"
            )
    others = [key for key in (NEGATIVE_IDS, NOT_EXHAUSTIVE_IDS) if key in image]
    if ANNOTATED_IDS in image and others:
        raise UserError(f"{where}: it has both '{ANNOTATED_IDS}' and '{others[0]}': choose one")


def join_keys(first: Entry, second: Entry) -> dict[str, Any]:
    """Returns the entry of an image that one file lists twice, with the keys of both entries.

    A class that one of them has annotated is annotated. If a class is not exhaustive in one of
    them, it stays so.
    """
    joined = dict(first)
    if ANNOTATED_IDS in first and ANNOTATED_IDS not in second:
        del joined[ANNOTATED_IDS]  # the second entry has all classes annotated
    for key in KEYS:
        is_in_both = key in first and key in second
        is_of_lvis = key != ANNOTATED_IDS and (key in first or key in second)
        if is_in_both or is_of_lvis:
            joined[key] = sorted({*first.get(key, ()), *second.get(key, ())})
    return joined


def set_annotated(image: Entry, ids: Collection[int], every_id: Collection[int]) -> dict[str, Any]:
    """Returns the entry of an image with ``ids`` as its annotated categories.

    ``every_id`` has the ids of all categories. If all of them are annotated, no key is needed.
    """
    entry = {key: value for key, value in image.items() if key not in KEYS}
    if set(ids) != set(every_id):
        entry[ANNOTATED_IDS] = sorted(ids)
    return entry


def mentions_keys(json_file: str | Path) -> bool:
    """Returns whether a COCO file may have one of the keys. Does not parse the file."""
    with (
        open(json_file, "rb") as stream,
        mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content,
    ):
        return any(content.find(f'"{key}"'.encode()) >= 0 for key in KEYS)
