# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Pictures of reconstructions: what was seen of each image, and what was made of it.

Images here are (S, S, 3) uint8 RGB.
"""

from collections.abc import Mapping, Sequence

import cv2
import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

from .detection_pictures import BACKGROUND, HEADING, RGBImage, get_font, tile_pictures

_GREY = 128
_GAP = 6


def show_visible(image: RGBImage, visible: npt.NDArray[np.bool_]) -> RGBImage:
    """Returns an image in grey but for what is visible.

    Args:
        image: (S, S, 3).
        visible: (S, S), True where the encoder looked.
    """
    return np.where(visible[..., None], image, np.uint8(_GREY))


def complete(
    image: RGBImage, visible: npt.NDArray[np.bool_], reconstruction: npt.NDArray[np.float32]
) -> RGBImage:
    """Returns the reconstruction around what was visible of the image.

    Args:
        image: (S, S, 3).
        visible: (S, S), True where the encoder looked.
        reconstruction: (S, S, 3), in the values of the image; cut off at 0 and 255.
    """
    made = np.rint(np.clip(reconstruction, 0, 255)).astype(np.uint8)
    return np.where(visible[..., None], image, made)


def draw_sheet(
    columns: Mapping[str, Sequence[RGBImage]],
    *,
    names: Sequence[str] = (),
    note: str = "",
    min_side: int = 160,
) -> RGBImage:
    """Returns a sheet with a row for each image and a title over each column.

    Args:
        columns: title and pictures, equally many, of one size.
        names: one for each row, written on the left; none leaves the sheet without.
        note: a line below.
        min_side: pixels; smaller pictures are enlarged by a whole number to at least this side.

    Raises:
        ValueError: there are no pictures, or the columns or the names differ in length.
    """
    lengths = {len(pictures) for pictures in columns.values()}
    if len(lengths) != 1 or 0 in lengths:
        raise ValueError("a sheet needs columns of equally many pictures, at least one in each")
    if names and {len(names)} != lengths:
        raise ValueError(f"{len(names)} names do not go with {lengths.pop()} rows")
    factor = max(1, -(-min_side // min(next(iter(columns.values()))[0].shape[:2])))
    rows = [
        [
            cv2.resize(picture, None, fx=factor, fy=factor, interpolation=cv2.INTER_NEAREST)
            for picture in row
        ]
        for row in zip(*columns.values(), strict=True)
    ]
    if names:
        height, width = rows[0][0].shape[:2]
        rows = [
            [_write_name(name, width, height), *row] for name, row in zip(names, rows, strict=True)
        ]
    headings = ["", *columns] if names else list(columns)
    pictures = [picture for row in rows for picture in row]
    sheet = tile_pictures(pictures, columns=len(headings), gap=_GAP)
    cell = (sheet.shape[1] + _GAP) // len(headings)
    titles = _strip(sheet.shape[1], cell, {i * cell: title for i, title in enumerate(headings)})
    notes = [_strip(sheet.shape[1], cell, {0: note})] if note else []
    return np.concatenate([titles, sheet, *notes])


def _write_name(name: str, width: int, height: int) -> RGBImage:
    """Returns a cell with a name in its middle, broken at spaces and slashes to fit."""
    size = max(11, round(width / 12))
    lines = [""]
    for word in name.replace("/", "/ ").split(" "):
        together = f"{lines[-1]} {word}".replace("/ ", "/").strip()
        if lines[-1] and get_font(size).getlength(together) > 0.94 * width:
            lines.append(word)
        else:
            lines[-1] = together
    longest = max(get_font(size).getlength(line) for line in lines)
    fitting = max(7, min(size, int(size * 0.94 * width / max(1.0, longest))))
    cell = Image.new("RGB", (width, height), BACKGROUND)
    ImageDraw.Draw(cell).multiline_text(
        (width / 2, height / 2), "\n".join(lines), font=get_font(fitting), fill=HEADING,
        anchor="mm", align="center",
    )  # fmt: skip
    return np.asarray(cell)


def _strip(width: int, cell: int, texts: Mapping[int, str]) -> RGBImage:
    """Returns a line of texts, each from its place on, in letters that suit the cells."""
    size = max(11, round(cell / 14))
    while size > 8 and any(get_font(size).getlength(text) > width - x for x, text in texts.items()):
        size -= 1
    strip = Image.new("RGB", (width, 2 * size), BACKGROUND)
    pen = ImageDraw.Draw(strip)
    for x, text in texts.items():
        pen.text((x + size * 0.3, size), text, font=get_font(size), fill=HEADING, anchor="lm")
    return np.asarray(strip)
