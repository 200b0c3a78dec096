# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Checks of what a COCO annotation draws: its box, polygons or RLE mask, and keypoints."""

import math
from array import array
from collections.abc import Iterable
from typing import Any

Entry = dict[str, Any]
Found = tuple[str, str] | None
"""Kind of an error and its reason, or None."""

_MAX_COORDINATE = 1e9
_MAX_SHIFT = 30  # of the last of seven groups of bits: run lengths have 35 bits at most


def find_shape_error(entry: Entry, size: tuple[int, int]) -> Found:
    """Returns what is wrong with an annotation of an image of a width and height, in pixels."""
    for key in ("iscrowd", "ignore"):
        if entry.get(key, 0) not in (0, 1):
            return f"annotation without a sound {key}", f"{key} must be 0 or 1"
    if entry.get("ignore", 0):
        reason = "'ignore' is not supported by Detectron2; remove the annotation or the key"
        return "ignored annotation", reason
    if not _can_be_drawn(entry.get("segmentation"), *size):
        return (
            "segmentation that cannot be drawn",
            "segmentation must be a list of polygons of finite coordinates near the image, or RLE "
            "with counts for every pixel and size [height, width] of the image",
        )
    if not _are_keypoints(entry.get("keypoints")):
        reason = "keypoints must be a list of finite numbers [x, y, visibility, …]"
        return "annotation with unsound keypoints", reason
    return find_box_error(entry, size)


def find_box_error(entry: Entry, size: tuple[float, float]) -> Found:
    """Returns what is wrong with the box of an annotation of an image of a width and height."""
    box: Any = entry.get("bbox")
    is_box = type(box) is list and len(box) == 4 and set(map(type, box)) <= {int, float}
    if not is_box or not _are_numbers([box], _MAX_COORDINATE):
        must = "four finite numbers [x, y, width, height] in pixels"
        return "annotation without a sound bbox", must_be(entry, "bbox", must)
    x, y, width, height = box
    if width < 0 or height < 0:
        return "box of negative size", f"bbox {short(box)} has a negative width or height"
    if has_area(entry) and not (-width < x < size[0] and -height < y < size[1]):
        reason = f"lies wholly outside its image of {size[0]} x {size[1]} pixels"
        hint = "bbox must be [x, y, width, height] in pixels"
        return "box outside its image", f"bbox {short(box)} {reason}; {hint}"
    return None


def has_area(entry: Entry) -> bool:
    """Returns whether an annotation's box has an area."""
    return bool(entry["bbox"][2] > 0 and entry["bbox"][3] > 0)


def has_polygon(entry: Entry) -> bool:
    """Returns whether an annotation has a polygon of three points, or RLE, or nothing.

    Detectron2 leaves out the others.
    """
    segmentation = entry.get("segmentation")
    if not segmentation or type(segmentation) is dict:
        return True
    return any(len(polygon) >= 6 and len(polygon) % 2 == 0 for polygon in segmentation)


def is_clipped(entry: Entry, size: tuple[int, int]) -> bool:
    """Returns whether a box reaches beyond its image; a pixel is rounding, which COCO has."""
    x, y, width, height = entry["bbox"]
    beyond = x < -1 or y < -1 or x + width > size[0] + 1 or y + height > size[1] + 1
    return beyond and has_area(entry)


def must_be(entry: Entry, key: str, must: str) -> str:
    """Says what a field of an entry must be, and what it is."""
    found = f"is {short(entry[key])}" if key in entry else "is missing"
    return f"{key} must be {must}, but {found}"


def short(value: object) -> str:
    """Returns a value as Python writes it, cut to 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "…"


def _can_be_drawn(segmentation: object, width: int, height: int) -> bool:
    if not segmentation:
        return True
    if type(segmentation) is dict:
        return _is_rle(segmentation, width, height)
    if type(segmentation) is not list or not set(map(type, segmentation)) <= {list}:
        return False
    # Drawing from far outside takes memory without end.
    return _are_numbers(segmentation, 11 * max(width, height))


def _are_keypoints(keypoints: object) -> bool:
    if not keypoints:
        return True
    return (
        type(keypoints) is list
        and len(keypoints) % 3 == 0
        and _are_numbers([keypoints], _MAX_COORDINATE)
    )


def _are_numbers(lists: Iterable[list[Any]], largest: float) -> bool:
    """Returns whether all in all lists are numbers up to a magnitude."""
    numbers = array("d")
    try:
        for values in lists:
            numbers.fromlist(values)
    except (TypeError, OverflowError):
        return False
    # Whether one is nan shows in the sum alone.
    return not numbers or (
        -largest <= min(numbers) and max(numbers) <= largest and not math.isnan(sum(numbers))
    )


def _is_rle(segmentation: Entry, width: int, height: int) -> bool:
    if segmentation.get("size") != [height, width]:
        return False
    runs: Any = segmentation.get("counts")
    if type(runs) is str:
        runs = _decode_runs(runs)
    if type(runs) is not list or not runs or not set(map(type, runs)) <= {int}:
        return False
    return min(runs) >= 0 and sum(runs) == width * height


def _decode_runs(counts: str) -> list[int] | None:
    """Returns the run lengths of a compressed RLE, or None if the string is none."""
    runs: list[int] = []
    value = shift = 0
    for character in counts:
        code = ord(character) - 48
        if not 0 <= code < 64 or shift > _MAX_SHIFT:
            return None
        value |= (code & 0x1F) << shift
        shift += 5
        if not code & 0x20:
            if code & 0x10:  # two's complement
                value -= 1 << shift
            runs.append(value + runs[-2] if len(runs) > 2 else value)
            value = shift = 0
    return None if shift else runs
