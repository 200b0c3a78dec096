# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Reads the labels to inspect, and applies the corrections that a user has confirmed."""

import copy
import hashlib
import json
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from qbheat_det.core.errors import UserError
from qbheat_det.core.files import parse_record, write_atomically
from qbheat_det.data import Annotations, find_annotated, open_source
from qbheat_det.data.datasets.annotated import restore_annotated
from qbheat_det.data.datasets.annotations import is_inside

Kind = Literal["missing", "location", "class", "extra", "duplicate"]
NEW_BOX_KINDS = ("missing", "location")
"""The kinds whose correction is a new box."""
REMOVED_KINDS = ("extra", "duplicate")
"""The kinds whose correction removes the annotation."""
XYWH = tuple[float, float, float, float]
_MIN_IMAGES = 10


class ImageBoxes(NamedTuple):
    """Boxes of an image (n, 4), XYXY in pixels, with classes (n,) and scores (n,).

    The scores of annotations are 1.
    """

    boxes: Tensor
    classes: Tensor
    scores: Tensor


@dataclass(frozen=True)
class LabelSuspect:
    """A label that is probably wrong, and its correction.

    Attributes:
        kind: "missing" (an object without a box), "location" (a misplaced box), "class" (a wrong
            class), "extra" (a box without an object) or "duplicate" (a second box of an object).
        score: probability of the error.
        image_id, file_name: id and file name of the image.
        annotation_id: id of the suspicious annotation; None if a box is missing.
        category_id, category: id and name of the class after the correction. If ``kind`` is
            "duplicate", those of the other box.
        bbox: box after the correction, XYWH in pixels. The correction of "extra" and "duplicate"
            removes the annotation, so this is the annotated box.
        annotated_category, annotated_bbox: class name and box (XYWH in pixels) of the suspicious
            annotation; None if a box is missing.
    """

    kind: Kind
    score: float
    image_id: int
    file_name: str
    annotation_id: int | None
    category_id: int
    category: str
    bbox: XYWH
    annotated_category: str | None = None
    annotated_bbox: XYWH | None = None

    @property
    def text(self) -> str:
        """The error in words, for the page of suspects."""
        if self.kind == "missing":
            return f"{self.category} without a box"
        if self.kind == "location":
            return f"{self.category}: the box is in a wrong place"
        if self.kind == "extra":
            return f"labelled {self.annotated_category}, but none is seen here"
        if self.kind == "duplicate" and self.category == self.annotated_category:
            return f"two boxes on one {self.category}"
        if self.kind == "duplicate":
            return f"labelled {self.annotated_category}, and also {self.category}"
        return f"labelled {self.annotated_category}, looks like {self.category}"

    @property
    def action(self) -> str:
        """What the correction does, in words."""
        if self.kind == "missing":
            return "Adds the orange box"
        if self.kind == "location":
            return "Moves the box"
        if self.kind in REMOVED_KINDS:
            return "Removes the box"
        return f"Changes the class to {self.category}"


class SuspectFile(NamedTuple):
    """The content of ``suspects.json`` or ``corrections.json``.

    ``digest`` is that of the labels. ``image_root`` is the folder of the images; "" in a file of
    corrections, which does not need them.
    """

    digest: str
    image_root: str
    suspects: list[LabelSuspect]


@dataclass(frozen=True)
class Labels:
    """The valid annotations of a data set's training part.

    ``digest`` is their SHA-256, by which corrections are matched with the inspected labels.
    """

    file: Annotations
    digest: str

    def find_unannotated(self) -> list[frozenset[int]]:
        """Returns the ids of the classes that each image may have objects of without a box."""
        annotated = find_annotated(self.file.keep())
        every_id = frozenset(self.file.category_ids)
        return [every_id - annotated.get(image["id"], every_id) for image in self.file.images]

    def list_annotations(self) -> list[list[dict[str, Any]]]:
        """Returns the annotations of each image, without crowds, in the order of the images."""
        by_image: dict[int, list[dict[str, Any]]] = {image["id"]: [] for image in self.file.images}
        for entry in self.file.annotations:
            if not entry.get("iscrowd", 0):
                by_image[entry["image_id"]].append(entry)
        return list(by_image.values())


def stack_boxes(entries: Sequence[dict[str, Any]]) -> ImageBoxes:
    """Converts COCO annotations or results of an image to tensors. Classes are category ids."""
    boxes = torch.tensor([entry["bbox"] for entry in entries], dtype=torch.float64).reshape(-1, 4)
    boxes[:, 2:] += boxes[:, :2]  # from XYWH to XYXY
    return ImageBoxes(
        boxes=boxes,
        classes=torch.tensor([entry["category_id"] for entry in entries], dtype=torch.long),
        scores=torch.tensor([entry.get("score", 1.0) for entry in entries], dtype=torch.float64),
    )


def open_labels(data: str, images: str = "", max_left_out: float | None = None) -> Labels:
    """Opens the training part of a data set with boxes, in any format of ``--data``.

    ``images`` is the folder of the images, if they are not in the folder of a COCO json.
    ``max_left_out`` is the share of images or boxes that may have faults; by default 0.1.

    Raises:
        UserError: the data set is invalid, or has no boxes or fewer than 10 images.
    """
    opened = open_source(data, images)
    if not opened.has_boxes:
        raise UserError(f"'{data}' has no images with boxes")
    file = opened.annotations[opened.train.part]
    file.check()
    file.account.check(max_left_out)
    if len(file.images) < _MIN_IMAGES:
        raise UserError(f"'{data}' has {len(file.images)} images, expected {_MIN_IMAGES} or more")
    text = json.dumps(file.keep(), sort_keys=True)
    return Labels(file, hashlib.sha256(text.encode()).hexdigest())


def apply_corrections(
    corrections: str | Path,
    data: str,
    output: Path,
    images: str = "",
    *,
    max_left_out: float | None = None,
) -> str:
    """Applies corrections to labels, and writes a COCO file. Returns a summary of the changes.

    Missing boxes are added, misplaced boxes are moved, wrong classes are changed, and boxes without
    an object and second boxes of an object are removed. A repeated correction is applied once.
    Existing ids and all other entries do not change. Masks of moved
    boxes are dropped.

    Args:
        corrections: ``corrections.json``, saved from ``suspects.html``; or ``suspects.json``, which
            applies the corrections of all suspects.
        data: the inspected data set, which does not change.
        output: the COCO file to write.
        images: folder of the images, if they are not in the folder of a COCO json.
        max_left_out: share of images or boxes that may have faults; by default 0.1.

    Raises:
        UserError: the corrections are invalid, belong to other labels, or contain two different
            corrections of one annotation; or ``output`` exists.
    """
    labels = open_labels(data, images, max_left_out)
    if output.exists():  # it may be part of the data set
        raise UserError(f"'{output}' exists: choose another --output folder")
    corrected = _CorrectedLabels(labels)
    for number, suspect in enumerate(read_corrections(corrections, labels.digest)):
        place = f"'{corrections}': suspects[{number}], image {suspect.image_id}"
        corrected.apply(suspect, number, place)
    write_atomically(output, json.dumps(corrected.list_content()).encode())
    folder = os.path.abspath(labels.file.image_root)
    command = shlex.join(["qbheat", "train", "--data", str(output), "--images", folder])
    return f"{corrected.summarize()}. Train on the corrected labels:\n{command}"


class _CorrectedLabels:
    """A copy of labels, to which corrections are applied one after the other."""

    def __init__(self, labels: Labels) -> None:
        self._content = copy.deepcopy(labels.file.keep())
        self._category_ids = labels.file.category_ids
        self._annotated = find_annotated(labels.file.keep())
        self._images = {image["id"]: image for image in self._content["images"]}
        # The annotations of the labels, and those of the corrected labels.
        self._annotations = {entry["id"]: entry for entry in self._content["annotations"]}
        self._entries = dict(self._annotations)
        self._applied: set[tuple[object, ...]] = set()
        self._corrected_by: dict[int, int] = {}  # number of the correction, by id
        self._counts = dict.fromkeys(get_args(Kind), 0)  # of applied corrections

    def apply(self, suspect: LabelSuspect, number: int, place: str) -> None:
        """Applies a correction, unless an equal one has been applied.

        Args:
            suspect: the correction.
            number: its position in the file.
            place: names the correction in messages.

        Raises:
            UserError: the correction does not fit the labels, or an earlier one.
        """
        if suspect.category_id not in self._category_ids:
            raise UserError(f"{place}: there is no class {suspect.category_id}")
        annotation = self._annotations.get(suspect.annotation_id)
        check_correction(place, suspect, self._images.get(suspect.image_id), annotation)
        change = (
            suspect.kind,
            suspect.image_id,
            suspect.annotation_id,
            suspect.category_id,
            suspect.bbox,
        )
        if change in self._applied:
            return
        self._applied.add(change)
        if suspect.annotation_id is not None:
            first = self._corrected_by.setdefault(suspect.annotation_id, number)
            if first != number:
                raise UserError(
                    f"{place}: suspects[{first}] corrects annotation {suspect.annotation_id} in "
                    "another way: remove one of the two"
                )
        self._counts[suspect.kind] += 1
        self._change(suspect, annotation)

    def _change(self, suspect: LabelSuspect, annotation: dict[str, Any] | None) -> None:
        """Adds, removes or changes an annotation; None stands for a missing one."""
        box = {"bbox": list(suspect.bbox), "area": suspect.bbox[2] * suspect.bbox[3]}
        if annotation is None:
            new_id = max([*self._annotations, *self._entries], default=0) + 1
            self._entries[new_id] = {
                "id": new_id,
                "image_id": suspect.image_id,
                "iscrowd": 0,
                **box,
                "category_id": suspect.category_id,
            }
        elif suspect.kind in REMOVED_KINDS:
            del self._entries[annotation["id"]]
        elif suspect.kind == "class":
            annotation["category_id"] = suspect.category_id
        else:
            annotation.pop("segmentation", None)  # the mask does not fit the moved box
            annotation.update(box)

    def list_content(self) -> dict[str, Any]:
        """Returns COCO's lists of the corrected labels."""
        content: dict[str, Any] = {**self._content, "annotations": list(self._entries.values())}
        content["images"] = restore_annotated(content, self._annotated)
        return content

    def summarize(self) -> str:
        """Returns the numbers of applied corrections."""
        counts = self._counts
        boxes = "box" if counts["missing"] == 1 else "boxes"
        num_removed = sum(counts[kind] for kind in REMOVED_KINDS)
        return (
            f"{counts['missing']:,} {boxes} added, {counts['location']:,} moved, "
            f"{counts['class']:,} given another class, {num_removed:,} removed"
        )


def check_correction(
    place: str,
    suspect: LabelSuspect,
    image: dict[str, Any] | None,
    annotation: dict[str, Any] | None,
) -> None:
    """Raises a ``UserError`` if a correction does not fit its image and its annotation.

    ``place`` names the correction in the message. ``image`` and ``annotation`` have the ids in
    ``suspect``; None if the labels have no such image or annotation.
    """
    if image is None:
        raise UserError(f"{place}: there is no such image")
    is_missing = suspect.kind == "missing"
    has_annotation = suspect.annotation_id is not None
    has_area = min(suspect.bbox[2:]) > 0
    # A missing box has no annotation, and an error of another kind has one.
    if is_missing == has_annotation or not has_area:
        raise UserError(f"{place}: the kind '{suspect.kind}' does not fit the annotation or box")
    if not is_missing and (annotation is None or annotation["image_id"] != suspect.image_id):
        raise UserError(f"{place}: the image has no annotation {suspect.annotation_id}")
    if suspect.kind in NEW_BOX_KINDS and not is_inside(suspect.bbox, image):
        size = f"{image['width']} x {image['height']}"
        raise UserError(f"{place}: bbox {suspect.bbox} is not inside the image of {size} pixels")


def read_corrections(path: str | Path, digest: str) -> list[LabelSuspect]:
    """Reads a file of corrections.

    Raises a ``UserError`` if it is invalid, or if it was not made for labels with this ``digest``.
    """
    content = read_suspects(path)
    if content.digest != digest:
        raise UserError(f"'{path}' belongs to other labels, or they have changed: inspect again")
    return content.suspects


def read_suspects(path: str | Path) -> SuspectFile:
    """Reads ``suspects.json`` or ``corrections.json``. Raises a ``UserError`` if it is invalid."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        digest = str(content["data"])
        image_root = str(content.get("image_root", ""))
        entries = list(content["suspects"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"'{path}' is not a file of corrections: {error}") from error
    suspects = []
    for index, entry in enumerate(entries):
        suspects.append(parse_record(LabelSuspect, entry, f"'{path}': suspects[{index}]"))
    return SuspectFile(digest, image_root, suspects)
