# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Pictures of detections: boxes with labels, predictions beside ground truth, contact sheets.

Images here are (H, W, 3) uint8 RGB. Boxes are (n, 4) XYXY in pixels of the image given; small
images are enlarged before anything is drawn, so that labels stay legible.
"""

import colorsys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import cv2
import matplotlib
import numpy as np
import numpy.typing as npt
from detectron2.structures import BoxMode, Instances
from PIL import Image, ImageDraw, ImageFont

RGBImage = npt.NDArray[np.uint8]
Color = tuple[int, int, int]
_Rectangle = tuple[float, float, float, float]

# Told apart on busy photographs, and by most people with a colour vision deficiency.
_PALETTE: tuple[Color, ...] = (
    (255, 196, 37),
    (45, 156, 255),
    (255, 92, 87),
    (38, 208, 124),
    (197, 120, 255),
    (255, 140, 26),
    (36, 214, 226),
    (255, 120, 190),
    (176, 214, 46),
    (122, 136, 255),
)
BACKGROUND: Color = (24, 26, 30)
"""Between pictures, and under headings."""
HEADING: Color = (226, 228, 232)


@dataclass(frozen=True)
class DrawnBoxes:
    """What to draw on one image.

    Attributes:
        boxes: (n, 4) XYXY, pixels.
        classes: (n,) contiguous class indices.
        scores: (n,) in [0, 1], or None for ground truth.
        masks: (n, H, W) boolean, or None.
    """

    boxes: npt.NDArray[np.float64]
    classes: npt.NDArray[np.int64]
    scores: npt.NDArray[np.float64] | None = None
    masks: npt.NDArray[np.bool_] | None = None

    @classmethod
    def from_instances(cls, instances: Instances) -> "DrawnBoxes":
        """Reads a model's output of one image, on any device."""
        instances = instances.to("cpu")
        return cls(
            boxes=instances.pred_boxes.tensor.detach().double().numpy(),
            classes=instances.pred_classes.numpy(),
            scores=instances.scores.detach().double().numpy(),
            masks=instances.pred_masks.numpy() > 0.5 if instances.has("pred_masks") else None,
        )

    @classmethod
    def from_dataset_dict(cls, record: Mapping[str, Any]) -> "DrawnBoxes":
        """Reads the boxes of a Detectron2 dataset dict; crowd regions are left out."""
        objects = [a for a in record.get("annotations", []) if not a.get("iscrowd", 0)]
        boxes = [BoxMode.convert(a["bbox"], a["bbox_mode"], BoxMode.XYXY_ABS) for a in objects]
        return cls(
            boxes=np.asarray(boxes, dtype=np.float64).reshape(-1, 4),
            classes=np.asarray([a["category_id"] for a in objects], dtype=np.int64),
        )


def get_class_name(class_names: Sequence[str], class_index: int) -> str:
    """Returns a class's name, or ``"class 3"`` where the names do not reach."""
    return class_names[class_index] if class_index < len(class_names) else f"class {class_index}"


def get_class_color(class_index: int) -> Color:
    """Returns the RGB colour that a class has in every picture."""
    if class_index < len(_PALETTE):
        return _PALETTE[class_index]
    hue = (class_index * 0.618034) % 1.0  # the golden angle keeps neighbours apart
    red, green, blue = colorsys.hls_to_rgb(hue, (0.52, 0.64, 0.74)[class_index % 3], 0.85)
    return round(255 * red), round(255 * green), round(255 * blue)


def draw_boxes(
    image: RGBImage, drawn: DrawnBoxes, class_names: Sequence[str], *, min_side: int = 384
) -> RGBImage:
    """Returns the image with labelled boxes, enlarged to a shorter side of ``min_side`` or more.

    Args:
        image: (H, W, 3) RGB.
        drawn: boxes in pixels of ``image``.
        class_names: in contiguous order.
        min_side: pixels; 0 keeps the size of the image.
    """
    height, width = image.shape[:2]
    scale = max(1.0, min_side / min(height, width))
    size = (round(width * scale), round(height * scale))
    # Large objects first, so that small ones stay visible on top of them.
    areas = np.prod(drawn.boxes[:, 2:] - drawn.boxes[:, :2], axis=1)
    order = [int(i) for i in np.argsort(-areas, kind="stable")]
    canvas = cv2.resize(image, size, interpolation=cv2.INTER_CUBIC) if scale > 1 else image.copy()
    if drawn.masks is not None:
        for i in order:
            _shade(canvas, drawn.masks[i], get_class_color(int(drawn.classes[i])))
    picture = Image.fromarray(canvas)
    pen = ImageDraw.Draw(picture)
    line = max(2, round(min(size) / 220))
    for i in order:
        _outline(pen, drawn.boxes[i] * scale, get_class_color(int(drawn.classes[i])), line, size)
    font = get_font(max(13, round(min(size) / 26)))
    taken: list[_Rectangle] = []
    for i in order:
        label = get_class_name(class_names, int(drawn.classes[i]))
        if drawn.scores is not None:
            label = f"{label} {drawn.scores[i]:.2f}"
        color = get_class_color(int(drawn.classes[i]))
        _put_label(pen, label, drawn.boxes[i] * scale, color, font, size, taken)
    return np.asarray(picture)


def draw_side_by_side(
    image: RGBImage,
    predicted: DrawnBoxes,
    truth: DrawnBoxes,
    class_names: Sequence[str],
    *,
    min_side: int = 384,
) -> RGBImage:
    """Returns one picture: predictions on the left, ground truth on the right, with headings."""
    panels = {"Prediction": predicted, "Ground truth": truth}
    return draw_panels(image, panels, class_names, columns=2, min_side=min_side)


def draw_panels(
    image: RGBImage,
    panels: Mapping[str, DrawnBoxes],
    class_names: Sequence[str],
    *,
    columns: int,
    min_side: int = 384,
) -> RGBImage:
    """Returns one picture: the image once for each heading, with its boxes, row by row."""
    drawn = [
        _add_heading(draw_boxes(image, boxes, class_names, min_side=min_side), heading)
        for heading, boxes in panels.items()
    ]
    return tile_pictures(drawn, columns=columns, gap=6)


def tile_pictures(pictures: Sequence[RGBImage], *, columns: int, gap: int = 8) -> RGBImage:
    """Returns a contact sheet: pictures row by row, each in the middle of an equal cell.

    Raises:
        ValueError: there are no pictures, or no columns.
    """
    if not pictures or columns < 1:
        raise ValueError("a contact sheet needs at least one picture and one column")
    cell_height = max(picture.shape[0] for picture in pictures)
    cell_width = max(picture.shape[1] for picture in pictures)
    columns = min(columns, len(pictures))
    rows = -(-len(pictures) // columns)
    height, width = rows * (cell_height + gap) - gap, columns * (cell_width + gap) - gap
    sheet = np.full((height, width, 3), BACKGROUND, dtype=np.uint8)
    for index, picture in enumerate(pictures):
        row, column = divmod(index, columns)
        top = row * (cell_height + gap) + (cell_height - picture.shape[0]) // 2
        left = column * (cell_width + gap) + (cell_width - picture.shape[1]) // 2
        sheet[top : top + picture.shape[0], left : left + picture.shape[1]] = picture
    return sheet


@lru_cache(maxsize=16)
def get_font(size: int) -> ImageFont.FreeTypeFont:
    """Returns the face of all lettering, in a size in pixels."""
    # matplotlib brings this face along, so labels look alike on every machine.
    path = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"
    return ImageFont.truetype(str(path), size)


def _shade(canvas: RGBImage, mask: npt.NDArray[np.bool_], color: Color) -> None:
    height, width = canvas.shape[:2]
    resized = cv2.resize(mask.astype(np.uint8), (width, height), interpolation=cv2.INTER_NEAREST)
    inside = resized > 0
    canvas[inside] = (0.6 * canvas[inside] + 0.4 * np.asarray(color)).astype(np.uint8)


def _outline(
    pen: ImageDraw.ImageDraw,
    box: npt.NDArray[np.float64],
    color: Color,
    line: int,
    size: tuple[int, int],
) -> None:
    x0, y0 = np.clip(np.round(box[:2]), 0, np.subtract(size, 1))
    x1, y1 = np.clip(np.round(box[2:]), (x0, y0), np.subtract(size, 1))
    # A dark rim keeps light colours visible on light backgrounds.
    pen.rectangle((x0 - 1, y0 - 1, x1 + 1, y1 + 1), outline=BACKGROUND, width=line + 2)
    pen.rectangle((x0, y0, x1, y1), outline=color, width=line)


def _put_label(
    pen: ImageDraw.ImageDraw,
    text: str,
    box: npt.NDArray[np.float64],
    color: Color,
    font: ImageFont.FreeTypeFont,
    size: tuple[int, int],
    taken: list[_Rectangle],
) -> None:
    pad = max(2, round(font.size / 5))
    width = pen.textlength(text, font=font) + 2 * pad
    height = sum(font.getmetrics()) + pad
    x0, y0, x1, y1 = (float(value) for value in box)
    # In order of preference: above the box, below it, then inside its corners.
    corners = [(x0, y0 - height), (x0, y1), (x0, y0), (x1 - width, y0), (x0, y1 - height)]
    places = []
    for left, top in corners:
        left = min(max(left, 0.0), max(size[0] - width, 0.0))
        top = min(max(top, 0.0), max(size[1] - height, 0.0))
        places.append((left, top, left + width, top + height))
    place = min(places, key=lambda p: sum(_overlap(p, other) for other in taken))
    taken.append(place)
    pen.rounded_rectangle(place, radius=pad, fill=color)
    luminance = 0.299 * color[0] + 0.587 * color[1] + 0.114 * color[2]
    ink = (16, 18, 22) if luminance > 110 else (255, 255, 255)
    pen.text((place[0] + pad, place[1] + pad / 2), text, font=font, fill=ink)


def _overlap(a: _Rectangle, b: _Rectangle) -> float:
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    return max(width, 0.0) * max(height, 0.0)


def _add_heading(picture: RGBImage, text: str) -> RGBImage:
    font = get_font(max(12, round(min(picture.shape[:2]) / 28)))
    height = 2 * font.size
    strip = Image.new("RGB", (picture.shape[1], round(height)), BACKGROUND)
    ImageDraw.Draw(strip).text(
        (font.size * 0.6, height / 2), text, font=font, fill=HEADING, anchor="lm"
    )
    return np.concatenate([np.asarray(strip), picture])
