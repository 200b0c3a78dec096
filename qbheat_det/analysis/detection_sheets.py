# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Sheets of single detections and boxes: each cut out with what is around it, and two lines."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import cv2
import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

from .detection_errors import Judged, find_best_on
from .detection_pictures import (
    BACKGROUND,
    HEADING,
    Color,
    RGBImage,
    get_class_name,
    get_font,
    tile_pictures,
)

TRUTH_COLOR: Color = (64, 156, 255)
"""Blue, of ground truth."""
FOUND_COLOR: Color = (255, 150, 30)
"""Orange, of detections."""
COLORS_EXPLAINED = "Blue boxes are ground truth, orange ones detections."
_CELL = 240  # pixels a side
_CONTEXT = 2.0  # sides of the part that is cut out, in those of the box
_LEAST = 48  # pixels of the image that are cut out at least
_QUIET: Color = (165, 170, 178)
_SMALLEST = 9  # pixels of the lettering


@dataclass(frozen=True)
class Case:
    """What one cell of a sheet shows.

    Attributes:
        image_id: of the image that it is cut out of.
        box: (4,) XYXY, pixels: what it is about, in its middle.
        truth: (n, 4), boxes of ground truth to be drawn.
        found: (m, 4), detections to be drawn.
        lines: two, below it.
    """

    image_id: int
    box: npt.NDArray[np.float64]
    truth: npt.NDArray[np.float64]
    found: npt.NDArray[np.float64]
    lines: tuple[str, str]


def describe_miss(
    judged: Judged, box: int, class_names: Sequence[str], *, image_area: float
) -> Case:
    """Returns the cell of a box that nothing is right on, with what the model made of it at best.

    That is the detection with the highest score, of any class, whose IoU with it is at least 0.5.

    Args:
        judged: of a set.
        box: index into ``judged.truth``.
        class_names: (K,).
        image_area: pixels.
    """
    corners = judged.truth.boxes[box]
    share = 100 * float(np.prod(corners[2:] - corners[:2])) / image_area
    first = f"{get_class_name(class_names, int(judged.truth.classes[box]))}, {share:.2g} % of image"
    best = find_best_on(judged, box)
    found = judged.boxes[[]] if best is None else judged.boxes[[best[0]]]
    second = "nothing on it at any score"
    if best is not None:
        name = get_class_name(class_names, int(judged.classes[best[0]]))
        second = f"at best: {name} {judged.scores[best[0]]:.2f}, IoU {best[1]:.2f}"
    return Case(int(judged.truth.image_ids[box]), corners, corners[None], found, (first, second))


def describe_alarm(judged: Judged, detection: int, class_names: Sequence[str]) -> Case:
    """Returns the cell of a detection that is on no box, with the box that is nearest, if any."""
    name = get_class_name(class_names, int(judged.classes[detection]))
    first = f"{name} {judged.scores[detection]:.2f}"
    near = int(judged.nearest[detection])
    truth, second = judged.truth.boxes[[]], "no box in the image"
    if near >= 0 and judged.ious[detection] > 0:
        truth = judged.truth.boxes[[near]]
        other = get_class_name(class_names, int(judged.truth.classes[near]))
        second = f"nearest: {other}, IoU {judged.ious[detection]:.2f}"
    elif near >= 0:
        second = "touches no box"
    corners = judged.boxes[detection]
    return Case(int(judged.image_ids[detection]), corners, truth, corners[None], (first, second))


def draw_case(image: RGBImage, case: Case) -> RGBImage:
    """Returns a cell: the box with what is around it, and the two lines below.

    The part is square, twice as long as the box, and moved so that it leaves the image no further
    than it must; what lies beyond is dark.

    Args:
        image: (H, W, 3) RGB.
        case: with boxes in pixels of ``image``.
    """
    x0, y0, x1, y1 = (float(value) for value in case.box)
    own = max(x1 - x0, y1 - y0)
    # As much of the image as there is, and of what is not there only what the box needs.
    side = math.ceil(max(min(max(_CONTEXT * own, _LEAST), max(image.shape[:2])), own))
    left = _place(round((x0 + x1 - side) / 2), side, image.shape[1])
    top = _place(round((y0 + y1 - side) / 2), side, image.shape[0])
    smoothing = cv2.INTER_AREA if side > _CELL else cv2.INTER_LINEAR
    cell = cv2.resize(_cut(image, left, top, side), (_CELL, _CELL), interpolation=smoothing)
    scale = _CELL / side
    picture = Image.fromarray(np.asarray(cell, dtype=np.uint8))
    pen = ImageDraw.Draw(picture)
    for boxes, color in ((case.truth, TRUTH_COLOR), (case.found, FOUND_COLOR)):
        for box in boxes:
            _outline(pen, (box - [left, top, left, top]) * scale, color)
    return np.concatenate([np.asarray(picture), _write_lines(case.lines)])


def draw_sheet(cells: Sequence[RGBImage], *, columns: int = 4) -> RGBImage:
    """Returns cells of ``draw_case`` on one sheet.

    Raises:
        ValueError: there are none.
    """
    return tile_pictures(cells, columns=columns, gap=8)


def _place(start: int, length: int, size: int) -> int:
    """Moves a stretch into the image, or the image into its middle if that is shorter."""
    return (size - length) // 2 if length > size else min(max(start, 0), size - length)


def _cut(image: RGBImage, left: int, top: int, side: int) -> RGBImage:
    """Returns the (side, side, 3) part of an image from a corner on, dark beyond its edges."""
    part = np.full((side, side, 3), BACKGROUND, dtype=np.uint8)
    height, width = image.shape[:2]
    x0, x1 = max(left, 0), min(left + side, width)
    y0, y1 = max(top, 0), min(top + side, height)
    if x0 < x1 and y0 < y1:
        part[y0 - top : y1 - top, x0 - left : x1 - left] = image[y0:y1, x0:x1]
    return part


def _outline(pen: ImageDraw.ImageDraw, corners: npt.NDArray[np.float64], color: Color) -> None:
    x0, y0, x1, y1 = (float(value) for value in corners)
    x1, y1 = max(x1, x0 + 1), max(y1, y0 + 1)
    pen.rectangle((x0 - 1, y0 - 1, x1 + 1, y1 + 1), outline=BACKGROUND, width=4)
    pen.rectangle((x0, y0, x1, y1), outline=color, width=2)


def _write_lines(lines: Sequence[str]) -> RGBImage:
    height = 18 * len(lines) + 8
    strip = Image.new("RGB", (_CELL, height), BACKGROUND)
    pen = ImageDraw.Draw(strip)
    for row, (line, color) in enumerate(zip(lines, (HEADING, _QUIET), strict=True)):
        size = 13
        while size > _SMALLEST and pen.textlength(line, font=get_font(size)) > _CELL - 8:
            size -= 1
        font = get_font(size)
        while len(line) > 2 and pen.textlength(line, font=font) > _CELL - 8:
            line = line[:-2] + "…"
        pen.text((4, 4 + 18 * row + 9), line, font=font, fill=color, anchor="lm")
    return np.asarray(strip)
