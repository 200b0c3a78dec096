# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Images of detections: beside ground truth, and crops of missed boxes and false alarms."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np
import numpy.typing as npt
from detectron2.data.detection_utils import read_image

from qbheat_det.core.figures import Image

from .box_drawing import (
    BACKGROUND,
    Color,
    RGBImage,
    add_heading,
    draw_boxes,
    get_class_color,
    get_class_name,
    tile_images,
)
from .detection_errors import DetectionErrors, find_best_cover

Array = npt.NDArray[np.float64]
Record = Mapping[str, Any]
"""An image of an annotation file: "id", "file_name", "width", "height"."""

TRUTH_COLOR: Color = (64, 156, 255)
FOUND_COLOR: Color = (255, 150, 30)
_MAX_SIDE = 560  # pixels of an image beside others
_CROP_SIDE = 240  # pixels of a crop, enlarged or reduced to it
_CONTEXT, _LEAST_CROP = 2.0, 48  # side of a crop in sides of its box, and in pixels of the image
_QUALITY = 82


class Crop(NamedTuple):
    """A part of an image around a box.

    Attributes:
        image_id: of the image.
        box: (4,) XYXY, pixels, in the middle of the crop.
        truth: (n, 4), boxes of ground truth to draw.
        found: (m, 4), detections to draw.
        lines: two lines of text.
    """

    image_id: int
    box: Array
    truth: Array
    found: Array
    lines: tuple[str, str]


def draw_predictions(
    records: Sequence[Record],
    root: Path,
    class_names: Sequence[str],
    runs: Mapping[str, tuple[DetectionErrors, float]],
    number: int,
) -> dict[str, Image]:
    """Draws ground truth and the detections of each run on images spread over the dataset.

    Args:
        records: all images; those that cannot be read are skipped.
        root: their folder.
        class_names: (K,).
        runs: detections and their lowest score that is drawn, by label.
        number: of images.
    """
    ordered = sorted(records, key=lambda record: record["id"])
    images: dict[str, Image] = {}
    for index in range(min(number, len(ordered))):
        record = ordered[index * len(ordered) // min(number, len(ordered))]
        pixels = _read(root, record)
        if pixels is None:
            continue
        scale = min(1.0, _MAX_SIDE / max(pixels.shape[:2]))
        small = np.asarray(cv2.resize(pixels, None, fx=scale, fy=scale,
                                      interpolation=cv2.INTER_AREA), dtype=np.uint8)  # fmt: skip
        truth = next(iter(runs.values()))[0].truth
        own = truth.image_ids == record["id"]
        names = [get_class_name(class_names, k) for k in truth.classes[own]]
        panels = [_draw_panel(small, "Ground truth", truth.xyxy[own] * scale, truth.classes[own],
                              names)]  # fmt: skip
        for label, (errors, threshold) in runs.items():
            found = errors.found
            kept = (found.image_ids == record["id"]) & (errors.scores >= threshold)
            names = [
                f"{get_class_name(class_names, k)} {score:.2f}"
                for k, score in zip(found.classes[kept], errors.scores[kept], strict=True)
            ]
            title = f"{label}, scores from {threshold:.2g}"
            panels.append(_draw_panel(small, title, found.xyxy[kept] * scale,
                                      found.classes[kept], names))  # fmt: skip
        sheet = tile_images(panels, columns=3 if len(panels) % 2 else 2)
        name = str(record["file_name"])
        images[f"predictions_{len(images) + 1}"] = Image.from_rgb(
            sheet, alt=f"Boxes on {name}", caption=name, quality=_QUALITY
        )
    return images


def draw_missed_boxes(
    records: Sequence[Record],
    root: Path,
    class_names: Sequence[str],
    errors: DetectionErrors,
    missed: Sequence[int],
    label: str,
) -> Image | None:
    """Draws crops of boxes without a correct detection; None if no image can be read.

    Each shows the detection with the highest score that covers the box, if there is one.
    """
    by_id = {record["id"]: record for record in records}

    def describe(b: int) -> Crop:
        box, image_id = errors.truth.xyxy[b], int(errors.truth.image_ids[b])
        area = by_id[image_id]["width"] * by_id[image_id]["height"]
        share = 100 * float(np.prod(box[2:] - box[:2])) / area
        first = (
            f"{get_class_name(class_names, int(errors.truth.classes[b]))}, {share:.2g} % of image"
        )
        best = find_best_cover(errors, b)
        if best is None:
            return Crop(
                image_id, box, box[None], box[None][:0], (first, "no detection at any score")
            )
        d, iou = best
        name = get_class_name(class_names, int(errors.found.classes[d]))
        second = f"best: {name} {errors.scores[d]:.2f}, IoU {iou:.2f}"
        return Crop(image_id, box, box[None], errors.found.xyxy[[d]], (first, second))

    return _draw_crops(by_id, root, map(describe, missed), f"{label}: missed boxes")


def draw_false_alarms(
    records: Sequence[Record],
    root: Path,
    class_names: Sequence[str],
    errors: DetectionErrors,
    alarms: Sequence[int],
    label: str,
) -> Image | None:
    """Draws crops of detections that cover no box, with the nearest box; None as above."""

    def describe(d: int) -> Crop:
        box = errors.found.xyxy[d]
        first = (
            f"{get_class_name(class_names, int(errors.found.classes[d]))} {errors.scores[d]:.2f}"
        )
        near = int(errors.nearest[d])
        truth, second = box[None][:0], "overlaps no box"
        if near >= 0 and errors.ious[d] > 0:
            truth = errors.truth.xyxy[[near]]
            other = get_class_name(class_names, int(errors.truth.classes[near]))
            second = f"nearest: {other}, IoU {errors.ious[d]:.2f}"
        return Crop(int(errors.found.image_ids[d]), box, truth, box[None], (first, second))

    by_id = {record["id"]: record for record in records}
    title = f"{label}: false alarms with the highest scores"
    return _draw_crops(by_id, root, map(describe, alarms), title)


def draw_crop(image: RGBImage, crop: Crop) -> RGBImage:
    """Returns the square around a box, with its two lines above.

    It is moved to stay inside the image (H, W, 3) as far as it can; the rest is dark.
    """
    x0, y0, x1, y1 = (float(value) for value in crop.box)
    own = max(x1 - x0, y1 - y0)
    side = math.ceil(max(min(max(_CONTEXT * own, _LEAST_CROP), max(image.shape[:2])), own))
    left = _fit(round((x0 + x1 - side) / 2), side, image.shape[1])
    top = _fit(round((y0 + y1 - side) / 2), side, image.shape[0])
    shift = np.array([[1, 0, -left], [0, 1, -top]], dtype=np.float64)
    part = cv2.warpAffine(image, shift, (side, side), borderValue=BACKGROUND)
    smoothing = cv2.INTER_AREA if side > _CROP_SIDE else cv2.INTER_LINEAR
    part = np.asarray(cv2.resize(part, (_CROP_SIDE, _CROP_SIDE), interpolation=smoothing))
    boxes = (np.concatenate([crop.truth, crop.found]) - [left, top] * 2) * (_CROP_SIDE / side)
    colors = [TRUTH_COLOR] * len(crop.truth) + [FOUND_COLOR] * len(crop.found)
    drawn = draw_boxes(part.astype(np.uint8), boxes, [""] * len(boxes), colors, min_side=0)
    return add_heading(drawn, *crop.lines)


def _draw_crops(
    records: Mapping[int, Record], root: Path, crops: Any, caption: str
) -> Image | None:
    cells, lines = [], []
    for crop in crops:
        pixels = _read(root, records[crop.image_id])
        if pixels is not None:
            cells.append(draw_crop(pixels, crop))
            lines.append(", ".join(crop.lines))
    if not cells:
        return None
    sheet = tile_images(cells, columns=4)
    return Image.from_rgb(sheet, alt="; ".join(lines), caption=caption, quality=_QUALITY)


def _draw_panel(
    image: RGBImage, title: str, boxes: Array, classes: npt.NDArray[np.int64], labels: Sequence[str]
) -> RGBImage:
    return add_heading(draw_boxes(image, boxes, labels, [*map(get_class_color, classes)]), title)


def _fit(start: int, length: int, size: int) -> int:
    """Moves an interval into the image, or centers the image in it if that is shorter."""
    return (size - length) // 2 if length > size else min(max(start, 0), size - length)


def _read(root: Path, record: Record) -> RGBImage | None:
    try:
        return np.ascontiguousarray(read_image(str(root / record["file_name"]), format="RGB"))
    except (OSError, SyntaxError, ValueError):  # what Pillow raises for broken files
        return None
