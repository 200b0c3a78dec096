# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The checks of what an annotation draws: its box, its polygons or RLE mask, its keypoints.

Each takes a :class:`CocoFile`, which notes the faults, and returns the sound annotations.
"""

from array import array
from collections.abc import Mapping
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .coco_file import BoolArray, CocoFile, Entry, must_be, short
from .faults import Fault

Sizes = Mapping[int, tuple[int, int]]  # width and height of an image by its id, in pixels

_MAX_COORDINATE = 1e9
_SHARE_WITHOUT_AREA = 1e-4  # COCO's own training file has two boxes without area in 860,001
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
    positive = _every(_boxes(annotations)[:, 2:] >= 0)
    reason = "has a negative width or height"
    annotations = _keep_box(file, annotations, positive, "box of negative size", reason)
    boxes = _boxes(annotations)
    if len(boxes) and boxes.max() <= 1 and (boxes % 1).any():
        relative = "all boxes lie between 0 and 1; bbox must be in pixels, not relative"
        file.faults.append(Fault("relative boxes", file.path, relative))
        return []
    return _keep_inside(file, _keep_with_area(file, annotations), size_of)


def has_area(annotations: list[Entry]) -> BoolArray:
    """Returns which annotations have a box with an area, (A,)."""
    return _every(_boxes(annotations)[:, 2:] > 0)


def keep_segmentations(file: CocoFile, annotations: list[Entry], size_of: Sizes) -> list[Entry]:
    """Returns the annotations without a segmentation, or with one that can be drawn.

    Detectron2 leaves out an object of which no polygon has three points: those stay here, with a
    warning; ``has_polygon`` says which.
    """
    good = [_can_be_drawn(a.get("segmentation"), size_of[a["image_id"]]) for a in annotations]
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


def _keep_with_area(file: CocoFile, annotations: list[Entry]) -> list[Entry]:
    good = has_area(annotations)
    if (~good).sum() <= _SHARE_WITHOUT_AREA * len(annotations):
        file.warn_about(annotations, ~good, "have a box without area and are left out")
        return annotations
    reason = "has no area; correct it, or remove the annotation"
    return _keep_box(file, annotations, good, "box without area", reason)


def _keep_inside(file: CocoFile, annotations: list[Entry], size_of: Sizes) -> list[Entry]:
    boxes = _boxes(annotations)
    sizes = np.array([size_of[a["image_id"]] for a in annotations], dtype=np.float64)
    low, high, sizes = boxes[:, :2], boxes[:, :2] + boxes[:, 2:], sizes.reshape(-1, 2)
    inside = _every((high > 0) & (low < sizes)) | ~has_area(annotations)
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


def _boxes(annotations: list[Entry]) -> NDArray[np.float64]:
    rows = chain.from_iterable(annotation["bbox"] for annotation in annotations)
    return np.fromiter(rows, np.float64, 4 * len(annotations)).reshape(-1, 4)


def _every(conditions: BoolArray) -> BoolArray:
    """Returns for each row whether all of it is true."""
    return np.asarray(conditions.all(axis=1))


def _can_be_drawn(segmentation: object, size: tuple[int, int]) -> bool:
    if not segmentation:
        return True
    if type(segmentation) is dict:
        return _is_rle(segmentation, size)
    if type(segmentation) is not list or not set(map(type, segmentation)) <= {list}:
        return False
    # What is drawn far outside takes time and memory without end.
    side = max(size)
    return _are_numbers(list(chain.from_iterable(segmentation)), -10 * side, 11 * side)


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
        and _are_numbers(keypoints, -_MAX_COORDINATE, _MAX_COORDINATE)
    )


def _are_numbers(values: list[Any], low: float, high: float) -> bool:
    """Returns whether all are numbers in a range; at C speed, as COCO has 40 million of them."""
    try:
        numbers = array("d", values)
    except (TypeError, OverflowError):
        return False
    # The sum is nan where one of them is, which min and max may miss.
    return not numbers or (low <= min(numbers) and max(numbers) <= high and sum(numbers) < np.inf)


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
