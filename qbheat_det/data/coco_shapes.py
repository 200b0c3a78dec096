# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The checks of what an annotation draws: its box, its polygons or RLE mask, its keypoints.

Each takes a :class:`CocoFile`, which notes the faults, and returns the sound annotations.
"""

from array import array
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .coco_file import BoolArray, CocoFile, Entry, must_be, short
from .faults import Fault

Floats = NDArray[np.float64]
Sizes = Mapping[int, tuple[int, int]]  # width and height of an image by its id, in pixels

_MAX_COORDINATE = 1e9
_SHARE_WITHOUT_AREA = 1e-4  # COCO's own training file has two boxes without area in 860,001
_BLOCK = 4096  # annotations whose polygons are looked at together
_MAX_RUN_BYTES = 7  # of one number in a compressed RLE: 35 bits


def keep_boxes(file: CocoFile, annotations: list[Entry], size_of: Sizes) -> list[Entry]:
    """Returns the annotations with a box in their image.

    A box without area stays, with a warning, where such boxes are very rare.
    """
    must = "four finite numbers [x, y, width, height] in pixels"
    annotations = file.with_type(annotations, "annotation", "bbox", list, must)
    if not _are_boxes([annotation["bbox"] for annotation in annotations]):
        good = [_are_boxes([annotation["bbox"]]) for annotation in annotations]
        fault = "annotation without a sound bbox"
        annotations = file.keep(
            annotations, "annotation", good, fault, lambda e: must_be(e, "bbox", must)
        )
    boxes = _boxes(annotations)
    positive = _every(boxes[:, 2:] >= 0)
    reason = "has a negative width or height"
    annotations = _keep_box(file, annotations, positive, "box of negative size", reason)
    boxes = boxes[positive]
    if len(boxes) and boxes.max() <= 1 and (boxes % 1).any():
        relative = "all boxes lie between 0 and 1; bbox must be in pixels, not relative"
        file.faults.append(Fault("relative boxes", file.path, relative))
        return []
    annotations, boxes = _keep_with_area(file, annotations, boxes)
    return _keep_inside(file, annotations, boxes, size_of)


def has_area(annotations: list[Entry]) -> BoolArray:
    """Returns which annotations have a box with an area, (A,)."""
    return _every(_boxes(annotations)[:, 2:] > 0)


def keep_segmentations(file: CocoFile, annotations: list[Entry], size_of: Sizes) -> list[Entry]:
    """Returns the annotations without a segmentation, or with one that can be drawn.

    Detectron2 leaves out an object of which no polygon has three points: those stay here, with a
    warning; ``has_polygon`` says which.
    """
    blocks = [annotations[i : i + _BLOCK] for i in range(0, len(annotations), _BLOCK)]
    good = list(chain.from_iterable(_which_can_be_drawn(block, size_of) for block in blocks))
    reason = (
        "segmentation must be a list of polygons of finite coordinates near the image, or RLE "
        "with counts for every pixel and size [height, width] of the image"
    )
    fault = "segmentation that cannot be drawn"
    annotations = file.keep(annotations, "annotation", good, fault, reason)
    left_out = ~has_polygon(annotations)
    file.warn_about(annotations, left_out, "have no polygon of three points and are left out")
    return annotations


def has_polygon(annotations: list[Entry]) -> BoolArray:
    """Returns which annotations have a polygon of three points, or RLE, or nothing, (A,)."""
    return np.array([_has_polygon(a.get("segmentation")) for a in annotations], dtype=bool)


def keep_keypoints(file: CocoFile, annotations: list[Entry]) -> list[Entry]:
    """Returns the annotations without keypoints, or with ``[x, y, visibility, …]``."""
    good = [_are_keypoints(annotation.get("keypoints")) for annotation in annotations]
    reason = "keypoints must be a list of finite numbers [x, y, visibility, …]"
    return file.keep(annotations, "annotation", good, "annotation with unsound keypoints", reason)


def _keep_with_area(
    file: CocoFile, annotations: list[Entry], boxes: Floats
) -> tuple[list[Entry], Floats]:
    good = _every(boxes[:, 2:] > 0)
    if (~good).sum() <= _SHARE_WITHOUT_AREA * len(annotations):
        file.warn_about(annotations, ~good, "have a box without area and are left out")
        return annotations, boxes
    reason = "has no area; correct it, or remove the annotation"
    return _keep_box(file, annotations, good, "box without area", reason), boxes[good]


def _keep_inside(
    file: CocoFile, annotations: list[Entry], boxes: Floats, size_of: Sizes
) -> list[Entry]:
    sizes = np.array([size_of[a["image_id"]] for a in annotations], dtype=np.float64)
    low, high, sizes = boxes[:, :2], boxes[:, :2] + boxes[:, 2:], sizes.reshape(-1, 2)
    inside = _every((high > 0) & (low < sizes)) | ~_every(boxes[:, 2:] > 0)
    # One pixel is rounding, which COCO's own file has.
    beyond = inside & ~_every((low >= -1) & (high <= sizes + 1))
    file.warn_about(annotations, beyond, "have a box beyond the image, which is clipped")
    reason = "lies wholly outside its image; bbox must be [x, y, width, height] in pixels"
    return _keep_box(file, annotations, inside, "box outside its image", reason)


def _keep_box(
    file: CocoFile, annotations: list[Entry], good: BoolArray, fault: str, reason: str
) -> list[Entry]:
    return file.keep(
        annotations, "annotation", good, fault, lambda e: f"bbox {short(e['bbox'])} {reason}"
    )


def _are_boxes(rows: list[list[Any]]) -> bool:
    types = set(map(type, chain.from_iterable(rows)))
    if not (set(map(len, rows)) <= {4} and types <= {int, float}):
        return False
    try:
        values = np.fromiter(chain.from_iterable(rows), np.float64, 4 * len(rows))
    except OverflowError:
        return False
    return bool((np.abs(values) <= _MAX_COORDINATE).all())  # false for nan


def _boxes(annotations: list[Entry]) -> Floats:
    rows = chain.from_iterable(annotation["bbox"] for annotation in annotations)
    return np.fromiter(rows, np.float64, 4 * len(annotations)).reshape(-1, 4)


def _every(conditions: BoolArray) -> BoolArray:
    """Returns for each row whether all of it is true."""
    return np.asarray(conditions.all(axis=1))


def _which_can_be_drawn(annotations: list[Entry], size_of: Sizes) -> list[bool]:
    """Returns which segmentations are sound: at C speed where all polygons of a block are."""
    segmentations: list[Any] = [annotation.get("segmentation") for annotation in annotations]
    if set(map(type, segmentations)) == {list} and (
        set(map(type, chain.from_iterable(segmentations))) <= {list}
    ):
        side = min(max(size_of[annotation["image_id"]]) for annotation in annotations)
        if _are_numbers(chain.from_iterable(segmentations), *_limits(side)):
            return [True] * len(annotations)
    sizes = (size_of[annotation["image_id"]] for annotation in annotations)
    return list(map(_can_be_drawn, segmentations, sizes))


def _can_be_drawn(segmentation: object, size: tuple[int, int]) -> bool:
    if not segmentation:
        return True
    if type(segmentation) is dict:
        return _is_rle(segmentation, size)
    if type(segmentation) is not list or not set(map(type, segmentation)) <= {list}:
        return False
    return _are_numbers(segmentation, *_limits(max(size)))


def _limits(side: int) -> tuple[int, int]:
    """Returns where coordinates must lie: drawing from far outside takes memory without end."""
    return -10 * side, 11 * side


def _has_polygon(segmentation: Any) -> bool:
    if not segmentation or type(segmentation) is dict:
        return True
    return any(len(polygon) >= 6 and len(polygon) % 2 == 0 for polygon in segmentation)


def _are_keypoints(keypoints: object) -> bool:
    if not keypoints:
        return True
    return (
        type(keypoints) is list
        and len(keypoints) % 3 == 0
        and _are_numbers([keypoints], -_MAX_COORDINATE, _MAX_COORDINATE)
    )


def _are_numbers(lists: Iterable[list[Any]], low: float, high: float) -> bool:
    """Returns whether all in all lists are numbers in a range; COCO has 40 million of them."""
    joined = array("d")
    try:
        for values in lists:
            joined.fromlist(values)
    except (TypeError, OverflowError):
        return False
    numbers = np.frombuffer(joined)
    return bool(((numbers >= low) & (numbers <= high)).all())  # false for nan


def _is_rle(segmentation: dict[str, Any], size: tuple[int, int]) -> bool:
    if segmentation.get("size") != [size[1], size[0]]:
        return False
    counts, pixels = segmentation.get("counts"), size[0] * size[1]
    if type(counts) is list:
        return (
            set(map(type, counts)) <= {int}
            and min(counts, default=-1) >= 0
            and (sum(counts) == pixels)
        )
    if type(counts) is not str:
        return False
    runs = _decode_runs(counts)
    return runs is not None and bool(runs.min() >= 0) and int(runs.sum()) == pixels


def _decode_runs(counts: str) -> NDArray[np.int64] | None:
    """Returns the run lengths of a compressed RLE, or None where the string is none.

    Each number is written in groups of five bits, least significant first, in characters from
    "0" on; bit 6 says that more follow, and from the third run on the difference to the run
    before the last is written.
    """
    try:
        codes = np.frombuffer(counts.encode("ascii"), np.uint8).astype(np.int64) - 48
    except UnicodeEncodeError:
        return None
    if not len(codes) or codes.min() < 0 or codes.max() > 63 or codes[-1] & 0x20:
        return None
    ends = np.flatnonzero((codes & 0x20) == 0)
    starts = np.concatenate([[0], ends[:-1] + 1])
    if (ends - starts).max() >= _MAX_RUN_BYTES:
        return None
    lengths = ends - starts + 1
    shifts = 5 * (np.arange(len(codes)) - np.repeat(starts, lengths))
    values = np.add.reduceat((codes & 0x1F) << shifts, starts)
    values -= np.where(codes[ends] & 0x10, 1 << (5 * lengths), 0)  # two's complement
    runs = values.copy()
    runs[1::2] = np.cumsum(values[1::2])
    runs[2::2] = np.cumsum(values[2::2])
    return runs
