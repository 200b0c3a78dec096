# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Attention laid over the image that it belongs to, in sheets with a scale of colours.

The colours are matplotlib's viridis: even steps of attention are even steps to the eye, and readers
with a colour vision deficiency tell them apart as well. The image below is grey, so that no colour
is the image's own. Images here are (H, W, 3) uint8 RGB.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import cv2
import matplotlib
import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

from .detection_pictures import BACKGROUND, HEADING, RGBImage, get_font

Map = npt.NDArray[np.float32]
"""(h, w), not negative."""

_OPACITY = 0.68  # of the colours on the image
_PEAKS = 0.05  # share of the attention that may lie above the top of a scale
_GAP = 4
_LABEL_WIDTH = 132
_TEXT = 12
_BAR = 10


@dataclass(frozen=True)
class AttentionRow:
    """One row of a sheet.

    Attributes:
        label: lines of text beside it.
        maps: one a column, each with positions ``strides`` pixels of the image apart.
        strides: one a map.
        unit: behind the number at the top of the scale.
        top: value at the top of the scale of all maps of the row; None finds it, see ``find_top``.
        least: the top of a scale that is found is not below this.
        together: whether all maps of the row share a scale; else each has one of its own, and the
            label says so.
        box: XYXY in pixels of the image, drawn on all maps; or None.
    """

    label: str
    maps: Sequence[Map]
    strides: Sequence[int]
    unit: str = ""
    top: float | None = None
    least: float = 0.0
    together: bool = True
    box: npt.NDArray[np.float64] | None = None

    def find_scale(self) -> float:
        """Returns the value at the top of the scale that all maps of the row share."""
        return self.top or max(self.least, find_top(self.maps))

    @property
    def exceeds(self) -> bool:
        """Whether a value lies above that."""
        return max(float(values.max()) for values in self.maps) > self.find_scale()


def find_top(maps: Sequence[Map]) -> float:
    """Returns the value at the top of a scale: that of the map that needs most.

    A twentieth of a map's attention lies on the positions with this value or more: a peak that is
    much less than all does not darken the rest, and one that is all is not cut off.
    """
    tops = []
    for values in maps:
        falling = np.sort(values, axis=None)[::-1]
        mass = np.cumsum(falling, dtype=np.float64)
        tops.append(float(falling[np.searchsorted(mass, _PEAKS * mass[-1])]))
    return max(tops)


def overlay_attention(image: RGBImage, values: Map, stride: float, top: float) -> RGBImage:
    """Returns the image in grey with attention in colours over it, smoothed between positions.

    Args:
        image: (H, W, 3).
        values: (h, w); where it reaches beyond the image, that part is not shown.
        stride: pixels of the image between two positions, the first half a stride from the corner.
        top: value of the last colour; larger ones have it too.
    """
    height, width = image.shape[:2]
    x, y = (
        ((np.arange(length, dtype=np.float32) + 0.5) / stride - 0.5) for length in (width, height)
    )
    columns, rows = np.meshgrid(x, y)
    # Beyond the outermost positions their value goes on, as at the rim of a padded map.
    smooth = cv2.remap(values, columns, rows, cv2.INTER_LINEAR, borderMode=cv2.BORDER_REPLICATE)
    colors = matplotlib.colormaps["viridis"](np.clip(smooth / max(top, 1e-12), 0, 1))[..., :3]
    grey = cv2.cvtColor(image, cv2.COLOR_RGB2GRAY)[..., None]
    return np.rint(_OPACITY * 255 * colors + (1 - _OPACITY) * grey).astype(np.uint8)


def draw_attention(
    image: RGBImage,
    rows: Sequence[AttentionRow],
    columns: Sequence[str],
    *,
    title: str,
    cell: int = 128,
) -> RGBImage:
    """Returns a sheet: the image and a title, then a row of overlays for each of ``rows``.

    Args:
        image: (H, W, 3), what was looked at.
        rows: with as many maps as there are columns.
        columns: their titles.
        title: lines of text beside the image.
        cell: pixels of the longer side of each picture.

    Raises:
        ValueError: there are no rows, or one has not as many maps as there are columns.
    """
    if not rows or any(len(row.maps) != len(columns) for row in rows):
        raise ValueError(f"each row of the sheet needs {len(columns)} maps, and there must be one")
    factor = cell / max(image.shape[:2])
    size = tuple(max(1, round(length * factor)) for length in (image.shape[1], image.shape[0]))
    small = cv2.resize(image, size, interpolation=cv2.INTER_AREA if factor < 1 else cv2.INTER_CUBIC)
    width, height = size
    row_height = max(height, 4 * _TEXT + 2 * _BAR)
    sheet = Image.new(
        "RGB",
        (
            _LABEL_WIDTH + len(columns) * (width + _GAP),
            (height + _GAP) + 2 * _TEXT + len(rows) * (row_height + _GAP),
        ),
        BACKGROUND,
    )
    pen = ImageDraw.Draw(sheet)
    sheet.paste(Image.fromarray(small), (0, 0))
    pen.multiline_text((width + 12, 8), title, font=get_font(_TEXT + 2), fill=HEADING, spacing=6)
    lefts = [_LABEL_WIDTH + index * (width + _GAP) for index in range(len(columns))]
    top = height + _GAP
    for left, column in zip(lefts, columns, strict=True):
        pen.text((left, top + _TEXT), column, font=get_font(_TEXT), fill=HEADING, anchor="lm")
    top += 2 * _TEXT
    for row in rows:
        shared = row.find_scale()
        _draw_label(sheet, top, row, shared)
        for left, values, stride in zip(lefts, row.maps, row.strides, strict=True):
            own = shared if row.together else max(row.least, find_top([values]))
            over = overlay_attention(small, values, stride * factor, own)
            if row.box is not None:
                over = _draw_box(over, row.box * factor)
            sheet.paste(Image.fromarray(over), (left, top))
        top += row_height + _GAP
    return np.asarray(sheet)


def stack_sheets(sheets: Sequence[RGBImage], gap: int = 14) -> RGBImage:
    """Returns sheets one below the other, as several runs are compared; the left sides agree."""
    width = max(sheet.shape[1] for sheet in sheets)
    parts: list[RGBImage] = []
    for sheet in sheets:
        wide = np.full((sheet.shape[0] + gap, width, 3), BACKGROUND, dtype=np.uint8)
        wide[: sheet.shape[0], : sheet.shape[1]] = sheet
        parts.append(wide)
    return np.concatenate(parts)[:-gap]


def _draw_label(sheet: Image.Image, top: int, row: AttentionRow, value: float) -> None:
    """Draws the lines of a row's label and its scale into the column at the left."""
    pen = ImageDraw.Draw(sheet)
    font = get_font(_TEXT)
    pen.multiline_text((0, top), row.label, font=font, fill=HEADING, spacing=4)
    lines = row.label.count("\n") + 1
    top += lines * (_TEXT + 6) + 2
    width = _LABEL_WIDTH - 16
    ramp = matplotlib.colormaps["viridis"](np.linspace(0, 1, width))[None, :, :3]
    bar = np.rint(255 * np.repeat(ramp, _BAR, axis=0)).astype(np.uint8)
    sheet.paste(Image.fromarray(bar), (0, top))
    limit = "\u2265 " if row.exceeds else ""
    number = f"{value:,.0f}" if value >= 10 else f"{value:.2g}"
    text = f"{limit}{number}{row.unit}" if row.together else "own scales"
    y = top + _BAR + 3
    pen.text((0, y), "0", font=font, fill=HEADING)
    pen.text((width, y), text, font=font, fill=HEADING, anchor="ra")


def _draw_box(image: RGBImage, box: npt.NDArray[np.float64]) -> RGBImage:
    picture = Image.fromarray(image)
    pen = ImageDraw.Draw(picture)
    x0, y0, x1, y1 = (float(value) for value in np.round(box))
    x1, y1 = max(x0, x1 - 1), max(y0, y1 - 1)
    # Dark and light together are seen on every colour.
    pen.rectangle((x0 - 1, y0 - 1, x1 + 1, y1 + 1), outline=BACKGROUND, width=3)
    pen.rectangle((x0, y0, x1, y1), outline=(255, 255, 255), width=1)
    return np.asarray(picture)
