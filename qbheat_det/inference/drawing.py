# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Draws boxes, masks and labels on images.

Images are (H, W, 3) uint8 RGB; boxes are (n, 4) XYXY in pixels of the image. Detectron2's
Visualizer draws with matplotlib instead, which takes several times as long per frame.
"""

import colorsys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import PIL.Image
import PIL.ImageDraw
import PIL.ImageFont

from .array_instances import ArrayInstances

if TYPE_CHECKING:  # an exported file runs without Detectron2
    from detectron2.structures import Instances

RGBImage = npt.NDArray[np.uint8]
"""(H, W, 3)."""
Color = tuple[int, int, int]
"""(red, green, blue), each from 0 to 255."""
BACKGROUND: Color = (24, 26, 30)
"""The color between images, and behind headings and labels."""
_MAX_ENLARGED_SIDE = 8192  # pixels; JPEG allows 65,500 and OpenCV 32,767
_MAX_LABEL = 100  # characters; Pillow takes minutes to draw a class name of 100,000
_GOLDEN_ANGLE = 0.618034  # step between hues, so that adjacent classes differ clearly


def get_class_color(index: int) -> Color:
    """Returns the RGB color of a class. A class has the same color in every image."""
    red, green, blue = colorsys.hls_to_rgb((0.12 + _GOLDEN_ANGLE * index) % 1, 0.6, 0.9)
    return round(255 * red), round(255 * green), round(255 * blue)


def draw_instances(
    image: RGBImage, instances: "Instances | ArrayInstances", class_names: Sequence[str]
) -> RGBImage:
    """Draws boxes with class names, and masks and scores if there are any, on a copy of an image.

    ``instances`` are predictions (``pred_boxes``) or ground truth (``gt_boxes``).
    """
    if isinstance(instances, ArrayInstances):
        boxes = instances.pred_boxes.astype(np.float64)
        classes = instances.pred_classes.tolist()
        return _draw_classes(image, boxes, classes, instances.scores.tolist(), class_names)
    instances = instances.to("cpu")
    fields = instances.get_fields()
    prefix = "pred" if "pred_boxes" in fields else "gt"
    boxes = fields[f"{prefix}_boxes"].tensor.detach().double().numpy()
    classes = fields[f"{prefix}_classes"].tolist()
    scores = None
    if "scores" in fields:
        scores = fields["scores"].tolist()
    if f"{prefix}_masks" in fields:
        image = _draw_masks(image, fields[f"{prefix}_masks"], instances.image_size, classes)
    return _draw_classes(image, boxes, classes, scores, class_names)


def _draw_masks(
    image: RGBImage, masks: Any, image_size: tuple[int, int], classes: Sequence[int]
) -> RGBImage:
    """Tints the masks in the colors of their classes, on a copy of an image."""
    from detectron2.structures import BitMasks, PolygonMasks

    if isinstance(masks, PolygonMasks):
        masks = BitMasks.from_polygon_masks(masks, *image_size)
    if isinstance(masks, BitMasks):
        masks = masks.tensor  # (n, H, W)
    image = image.copy()
    for mask, k in zip(masks.numpy() > 0.5, classes, strict=True):
        image[mask] = (0.6 * image[mask] + 0.4 * np.asarray(get_class_color(k))).astype(np.uint8)
    return image


def _draw_classes(
    image: RGBImage,
    boxes: npt.NDArray[np.float64],
    classes: Sequence[int],
    scores: Sequence[float] | None,
    class_names: Sequence[str],
) -> RGBImage:
    """Draws boxes (n, 4) with class names, and scores if they are given, on a copy of an image."""
    labels = []
    for k in classes:
        labels.append(class_names[k] if k < len(class_names) else f"class {k}")
    if scores is not None:
        labels = [f"{label} {score:.2f}" for label, score in zip(labels, scores, strict=True)]
    return draw_boxes(image, boxes, labels, [get_class_color(k) for k in classes])


def draw_boxes(
    image: RGBImage,
    boxes: npt.NDArray[np.float64],
    labels: Sequence[str],
    colors: Sequence[Color],
    *,
    min_side: int = 384,
) -> RGBImage:
    """Draws boxes (n, 4) with labels and colors on a copy of an image.

    An image whose shorter side is below ``min_side`` is enlarged to this side, but its longer side
    becomes at most 8,192 pixels. Boxes are in pixels of the original image.
    """
    height, width = image.shape[:2]
    wanted_scale = min_side / min(height, width)
    max_scale = _MAX_ENLARGED_SIDE / max(height, width)
    scale = max(1.0, min(wanted_scale, max_scale))
    if scale > 1:
        import cv2  # large images do not need it

        width = round(width * scale)
        height = round(height * scale)
        image = np.asarray(cv2.resize(image, (width, height), interpolation=cv2.INTER_CUBIC))
    labels = [label[:_MAX_LABEL] for label in labels]
    canvas = PIL.Image.fromarray(image)
    pen = PIL.ImageDraw.Draw(canvas)
    line_width = max(2, round(min(height, width) / 220))
    font = get_font(max(13, round(min(height, width) / 26)))
    corners = np.clip(np.round(boxes * scale), 0, [width - 1, height - 1, width - 1, height - 1])
    corners[:, 2:] = np.maximum(corners[:, 2:], corners[:, :2])  # as Pillow requires
    # Large boxes first, so that small ones and their labels stay visible.
    areas = (corners[:, 2:] - corners[:, :2]).prod(axis=1)
    order = np.argsort(-areas, kind="stable").tolist()
    for i in order:
        x0, y0, x1, y1 = corners[i].tolist()
        # A dark rim keeps light colors visible on light backgrounds.
        pen.rectangle((x0 - 1, y0 - 1, x1 + 1, y1 + 1), outline=BACKGROUND, width=line_width + 2)
        pen.rectangle((x0, y0, x1, y1), outline=colors[i], width=line_width)
    # All labels after all boxes, so that no box covers a label.
    for i in order:
        if not labels[i]:
            continue
        left, top = corners[i, :2].tolist()
        _, _, text_width, text_height = pen.textbbox((0, 0), labels[i], font=font)
        # The label is above the corner of the box, and inside the image.
        left = max(0, min(left, width - text_width - 4))
        top = max(0, top - text_height - 4)
        pen.rectangle((left, top, left + text_width + 4, top + text_height + 4), fill=colors[i])
        pen.text((left + 2, top + 2), labels[i], font=font, fill=BACKGROUND)
    return np.asarray(canvas)


@lru_cache(maxsize=16)
def get_font(size: int) -> PIL.ImageFont.FreeTypeFont:
    """Returns the font of all labels in a size of ``size`` pixels."""
    import matplotlib

    # matplotlib ships this font, so labels are the same on every machine.
    path = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"
    return PIL.ImageFont.truetype(str(path), size)
