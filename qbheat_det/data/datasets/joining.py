# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Joins several data sets to one, in which each image knows which classes are annotated in it.

Classes are joined by name, after ``--class-map`` has renamed synonyms. All classes of a data set
are annotated in its images, unless its label files say otherwise (``annotated.py``). An image file
that several data sets have, possibly under another name, becomes one image with the labels of all.
"""

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from qbheat_det.core.errors import UserError
from qbheat_det.core.text import join_first, one_line

from .account import Account, LeftOut
from .annotated import find_annotated, set_annotated
from .annotations import Annotations
from .fingerprints import fingerprint_images
from .labelled_image import MARGIN
from .text_files import UnreadableFileError, read_text

Entry = dict[str, Any]
Dropped = list[tuple[Account, LeftOut]]
"""Boxes that are not used because another data set has the same image, and their accounts."""


def read_class_map(path: str | Path) -> dict[str, str]:
    """Reads a YAML file that maps class names in data sets to class names of the detector.

    Names are read as they are written, so that ``on: off`` and ``1: 2`` need no quotes.

    Raises:
        UserError: the file is no such mapping, or names a class twice.
    """
    try:
        root = yaml.compose(read_text(path).content, Loader=yaml.SafeLoader)
    except (OSError, UnreadableFileError, yaml.YAMLError) as error:
        raise UserError(f"'{path}' cannot be read: {one_line(error)}") from error
    class_map: dict[str, str] = {}
    if not isinstance(root, yaml.MappingNode):
        raise UserError(f"'{path}' must map class names to class names, as in 'bike: bicycle'")
    for key, value in root.value:
        if not isinstance(key, yaml.ScalarNode) or not isinstance(value, yaml.ScalarNode):
            line = key.start_mark.line + 1
            raise UserError(f"'{path}', line {line}: a class name must map to one class name")
        if key.value in class_map:
            raise UserError(f"'{path}' names the class '{key.value}' twice")
        class_map[key.value] = value.value
    return class_map


def check_class_map(class_map: Mapping[str, str], names: Collection[str], where: str) -> None:
    """Checks a class map against the names of the classes in all data sets.

    Raises:
        UserError: a renamed class is in no data set, a new name is empty, or a new name is itself
            renamed. The message begins with ``where``.
    """
    for old, new in class_map.items():
        if not new.strip():
            raise UserError(f"{where}: '{old}' has no new name")
        if new in class_map:
            raise UserError(f"{where}: '{old}' becomes '{new}', which is renamed too: choose one")
    unused = [repr(name) for name in class_map if name not in names]
    if unused:
        raise UserError(
            f"{where}: no data set has the class {join_first(unused)}, only "
            f"{join_first(map(repr, names), 10)}"
        )


def join_class_names(
    names_of_sets: Iterable[Sequence[str]], class_map: Mapping[str, str]
) -> list[str]:
    """Returns the names of the joined classes, in the order of their first appearance."""
    names = [class_map.get(name, name) for names in names_of_sets for name in names]
    return list(dict.fromkeys(names))


@dataclass
class _Image:
    """An image of one data set, or of several, with the ids of the joined classes.

    Attributes:
        path: path of the file.
        entry: its entry in COCO's list of images.
        annotated: ids of its annotated classes.
        boxes: its annotations in COCO's format, and the account that counts each of them.
        origin: the data set, for messages.
    """

    path: str
    entry: Entry
    annotated: frozenset[int]
    boxes: list[tuple[Entry, Account]]
    origin: str


def join_annotations(
    members: Sequence[Annotations], class_names: Sequence[str], class_map: Mapping[str, str]
) -> tuple[Annotations, Dropped]:
    """Joins the images and boxes of data sets.

    If the same file is in several data sets, the boxes of each class are those of the first data
    set that has this class annotated in the image. The account of the result has only notes.

    Args:
        members: the data sets. They do not change.
        class_names: names of the joined classes.
        class_map: maps class names in data sets to those in ``class_names``.

    Returns:
        The joined annotations, and the boxes that are not used for another data set's.

    Raises:
        UserError: a data set has a class that is not in ``class_names``, or two data sets have the
            same image in different sizes.
    """
    ids = {name: id_ for id_, name in enumerate(class_names, start=1)}
    images: list[_Image] = []
    known: dict[str, _Image] = {}  # images of earlier data sets by fingerprint
    shared: list[str] = []
    dropped: Dropped = []
    for member in members:
        of_member = _read_images(member, ids, class_map)
        fingerprints: dict[str, str] = {}
        if len(members) > 1:
            fingerprints = fingerprint_images([image.path for image in of_member])
        new: dict[str, _Image] = {}
        for image in of_member:
            fingerprint = fingerprints.get(image.path, "")
            first = known.get(fingerprint)
            if first is None:
                images.append(image)
                new[fingerprint] = image
            else:
                shared.append(f"'{first.path}' of '{first.origin}' and '{member.origin}'")
                dropped += _merge(first, image)
        new.pop("", None)  # files that could not be read
        known |= new
    result = _build(members, images, ids)
    if shared:
        result.account.notes.append(
            f"{len(shared):,} images are in several data sets, and have the labels of all: "
            f"{join_first(shared)}"
        )
    return result, dropped


def _read_images(
    member: Annotations, ids: Mapping[str, int], class_map: Mapping[str, str]
) -> list[_Image]:
    """Returns the images of a data set. ``ids`` has the ids of the joined classes by name."""
    names = [class_map.get(name, name) for name in member.class_names]
    unknown = [repr(name) for name in names if name not in ids]
    if unknown:
        raise UserError(
            f"'{member.origin}' has {join_first(unknown)}, which is none of the classes "
            f"{join_first(map(repr, ids), 10)}: name its class with --class-map"
        )
    new_ids = {id_: ids[name] for id_, name in zip(member.category_ids, names, strict=True)}
    annotated = find_annotated(member.keep())
    images: dict[int, _Image] = {}
    for entry in member.images:
        # Where several classes are joined to one, all of them must be annotated.
        lacking = new_ids.keys() - annotated.get(entry["id"], new_ids.keys())
        of_image = frozenset(new_ids.values()) - {new_ids[id_] for id_ in lacking}
        path = os.path.join(member.image_root, entry["file_name"])
        images[entry["id"]] = _Image(path, entry, of_image, [], member.origin)
    for box in member.annotations:
        renamed = {**box, "category_id": new_ids[box["category_id"]]}
        images[box["image_id"]].boxes.append((renamed, member.account))
    return list(images.values())


def _merge(first: _Image, second: _Image) -> Dropped:
    """Adds the labels of an image to those of the same image of an earlier data set.

    Returns the boxes that are not used.
    """
    sizes = [(image.entry.get("width"), image.entry.get("height")) for image in (first, second)]
    if sizes[0] != sizes[1]:
        raise UserError(
            f"'{first.path}' of '{first.origin}' and '{second.path}' of '{second.origin}' are the "
            f"same image, but have sizes {sizes[0]} and {sizes[1]} there: correct one of them"
        )
    classes_of_first = {box["category_id"] for box, _ in first.boxes}
    kept: list[tuple[Entry, Account]] = []
    unused: list[tuple[Entry, Account, _Image]] = []
    for image in (first, second):
        for box, account in image.boxes:
            class_id = box["category_id"]
            belongs_to_first = class_id in first.annotated
            if class_id not in first.annotated and class_id not in second.annotated:
                belongs_to_first = class_id in classes_of_first
            if belongs_to_first == (image is first):
                kept.append((box, account))
            else:
                unused.append((box, account, image))
    dropped = []
    for box, account, image in unused:
        other = second if image is first else first
        left_out = LeftOut(
            kind="of an image with other labels",
            where=f"'{image.path}' of '{image.origin}', box {box['bbox']}",
            reason=f"the labels of this class and image are those of '{other.origin}'",
            item="box",
            is_fault=not any(_is_same_box(box, other_box) for other_box, _ in kept),
        )
        dropped.append((account, left_out))
    first.boxes = kept
    first.annotated |= second.annotated
    return dropped


def _is_same_box(first: Entry, second: Entry) -> bool:
    """Returns whether two boxes of a class are equal up to rounding."""
    if first["category_id"] != second["category_id"]:
        return False
    pairs = zip(first["bbox"], second["bbox"], strict=True)
    return all(abs(value - other) <= MARGIN for value, other in pairs)


def _build(
    members: Sequence[Annotations], images: Sequence[_Image], ids: Mapping[str, int]
) -> Annotations:
    """Returns COCO's lists of the joined images. ``ids`` has the ids of the classes by name."""
    is_single = len(members) == 1
    result = Annotations(
        origin=" + ".join(member.origin for member in members),
        image_root=members[0].image_root if is_single else os.sep,
        images=[],
        annotations=[],
        categories=[{"id": id_, "name": name} for name, id_ in ids.items()],
        account=Account(),
        problem=next((member.problem for member in members if member.problem), ""),
        broken=[path for member in members for path in member.broken],
    )
    for image_id, image in enumerate(images, start=1):
        name = image.entry["file_name"] if is_single else image.path
        entry = {**image.entry, "id": image_id, "file_name": name}
        result.images.append(set_annotated(entry, image.annotated, ids.values()))
        if not is_single:
            result.sets[name] = image.origin
        for box, _ in image.boxes:
            new_id = len(result.annotations) + 1
            result.annotations.append({**box, "id": new_id, "image_id": image_id})
    return result
