# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Pictures of detections in their images: beside ground truth, and where they are worst."""

from collections.abc import Callable, Mapping
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt
from detectron2.data.detection_utils import read_image

from qbheat_det.analysis.detection_errors import Judged
from qbheat_det.analysis.detection_pictures import DrawnBoxes, RGBImage, draw_panels
from qbheat_det.analysis.detection_sheets import (
    Case,
    describe_alarm,
    describe_miss,
    draw_case,
    draw_sheet,
)
from qbheat_det.analysis.html_report import Picture

from .found_boxes import BoxSet

_MAX_SIDE = 560  # of an image beside others, in pixels
_QUALITY = 82
_TRIED = 10  # images in a row that cannot be read


def draw_predictions(
    boxes: BoxSet, runs: Mapping[str, tuple[Judged, float]], number: int
) -> dict[str, Picture]:
    """Returns pictures of ground truth and of each run's boxes, of images spread over the set.

    Images that cannot be read are passed over.

    Args:
        boxes: the set.
        runs: detections and their lowest score that is drawn, by the runs' names.
        number: of pictures.
    """
    images = sorted(boxes.content["images"], key=lambda image: image["id"])
    number = min(number, len(images))
    pictures: dict[str, Picture] = {}
    for index in range(number):
        start = index * len(images) // number
        end = min((index + 1) * len(images) // number, start + _TRIED)
        for image in images[start:end]:
            pixels = _read(boxes, image)
            if pixels is not None:
                pictures[f"predictions_{len(pictures) + 1}"] = _draw_one(boxes, runs, image, pixels)
                break
    return pictures


def draw_misses(
    boxes: BoxSet, judged: Judged, misses: npt.NDArray[np.int64], label: str
) -> Picture | None:
    """Returns a sheet of boxes that nothing is right on; None where there is none to be drawn."""
    areas = {image["id"]: image["width"] * image["height"] for image in boxes.content["images"]}

    def describe(box: int) -> Case:
        area = areas[int(judged.truth.image_ids[box])]
        return describe_miss(judged, box, boxes.class_names, image_area=area)

    return _draw_cases(boxes, misses, describe, f"{label}: worst misses")


def draw_alarms(
    boxes: BoxSet, judged: Judged, alarms: npt.NDArray[np.int64], label: str
) -> Picture | None:
    """Returns a sheet of detections that are on no box; None where there is none to be drawn."""
    return _draw_cases(
        boxes,
        alarms,
        lambda detection: describe_alarm(judged, detection, boxes.class_names),
        f"{label}: false alarms with the highest scores",
    )


def _draw_cases(
    boxes: BoxSet,
    indices: npt.NDArray[np.int64],
    describe: Callable[[int], Case],
    caption: str,
) -> Picture | None:
    images = {image["id"]: image for image in boxes.content["images"]}
    cells, told = [], []
    for index in indices:
        case = describe(int(index))
        pixels = _read(boxes, images[case.image_id])
        if pixels is not None:
            cells.append(draw_case(pixels, case))
            told.append(", ".join(case.lines))
    if not cells:
        return None
    alt = f"{caption}: {'; '.join(told)}"
    return Picture.from_rgb(draw_sheet(cells), alt=alt, caption=caption, quality=_QUALITY)


def _draw_one(
    boxes: BoxSet,
    runs: Mapping[str, tuple[Judged, float]],
    image: Mapping[str, Any],
    pixels: RGBImage,
) -> Picture:
    height, width = pixels.shape[:2]
    scale = min(1.0, _MAX_SIDE / max(height, width))
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    small = np.asarray(cv2.resize(pixels, size, interpolation=cv2.INTER_AREA), dtype=np.uint8)
    truth = next(iter(runs.values()))[0].truth
    own = truth.image_ids == image["id"]
    panels = {"Ground truth": DrawnBoxes(truth.boxes[own] * scale, truth.classes[own])}
    for label, (judged, threshold) in runs.items():
        kept = (judged.image_ids == image["id"]) & (judged.scores >= threshold)
        panels[f"{label}, scores from {threshold:.2g}"] = DrawnBoxes(
            judged.boxes[kept] * scale, judged.classes[kept], judged.scores[kept]
        )
    columns = 3 if len(panels) % 2 else 2  # no more, for a phone
    sheet = draw_panels(small, panels, boxes.class_names, columns=columns)
    counts = ", ".join(f"{heading}: {len(drawn.boxes)}" for heading, drawn in panels.items())
    name = image["file_name"]
    return Picture.from_rgb(
        sheet, alt=f"{name}, boxes of {counts}", caption=f"{name}", quality=_QUALITY
    )


def _read(boxes: BoxSet, image: Mapping[str, Any]) -> RGBImage | None:
    try:
        pixels = read_image(str(boxes.image_root / image["file_name"]), format="RGB")
    except (OSError, SyntaxError, ValueError):  # what Pillow has for broken files
        return None
    return np.ascontiguousarray(pixels)
