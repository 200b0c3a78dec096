# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Charts and image grids. Functions decorated with ``@themed`` use the same matplotlib theme."""

import io
import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import cv2
import matplotlib
import numpy as np
import numpy.typing as npt
import PIL.Image
import PIL.ImageDraw
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from qbheat_det.evaluation import find_confusions
from qbheat_det.inference.drawing import BACKGROUND, Color, RGBImage, draw_boxes, get_font

from .figures import Image

Format = Literal["svg", "jpg"]

TEXT_COLOR = "#1c1e21"
AXIS_COLOR = "#63676e"
LINE_COLORS = ("#1f6feb", "#a83300", "#00ab62", "#a23098", "#d48000", "#44534c")
"""Colors of lines and bars, in order of use. The theme has the same colors."""
_HEADING_COLOR: Color = (226, 228, 232)
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_DASHES = ("-", "--", ":", "-.")
_MAX_NAME_LENGTH = 40  # characters
_MAX_TICK_LABELS = 110  # a confusion matrix of more classes does not name them
_MAX_WRITTEN_CLASSES = 12  # a confusion matrix of more classes has no numbers in its cells
_MAX_CONFUSIONS = 30  # length of the list below a confusion matrix
_GAP = 4  # pixels between the images of a grid
_DPI = {"svg": 160, "jpg": 100}
_MEDIA_TYPES = {"svg": "image/svg+xml", "jpg": "image/jpeg"}

themed = matplotlib.rc_context(fname=Path(__file__).with_name("theme.mplstyle"))
"""Decorator of functions that draw. Within the function, matplotlib uses the theme's settings."""


@themed
def start_figure(*, height: float, width: float) -> Figure:
    """Returns an empty figure. Sizes are in inches."""
    figure = Figure(figsize=(width, height))  # without pyplot, which keeps global state
    figure.set_layout_engine("constrained", w_pad=0.1, h_pad=0.08)
    return figure


@themed
def start_chart(*, height: float) -> tuple[Figure, Axes]:
    """Returns a figure, 6.4 inches wide, with one pair of axes. ``height`` is in inches."""
    figure = start_figure(height=height, width=6.4)
    return figure, figure.add_subplot()


def list_styles(number: int) -> list[dict[str, Any]]:
    """Returns matplotlib's style of each of ``number`` lines. The first 24 are different.

    The dash changes when all colors have been used.
    """
    styles = []
    for index in range(number):
        cycle, color_index = divmod(index, len(LINE_COLORS))
        styles.append(
            {
                "color": LINE_COLORS[color_index],
                "linestyle": _DASHES[cycle % len(_DASHES)],
                "marker": _MARKERS[index % len(_MARKERS)],
            }
        )
    return styles


def to_text(name: str, *, max_length: int = _MAX_NAME_LENGTH) -> str:
    """Escapes a name for matplotlib and replaces the middle of a long name by an ellipsis."""
    text = name.encode(errors="backslashreplace").decode()  # file names may be invalid Unicode
    text = " ".join(text.split())  # without line breaks
    if len(text) > max_length:
        num_kept = max_length - 1  # without the ellipsis
        num_last = num_kept // 2
        num_first = num_kept - num_last
        text = f"{text[:num_first]}…{text[-num_last:]}"
    text = text.replace("$", r"\$")  # matplotlib starts a formula at $
    if text.startswith("_"):  # matplotlib hides labels that start with an underscore
        text = f" {text}"
    return text


@themed
def add_legend(figure: Figure, *panels: Axes) -> None:
    """Adds a legend below all panels, with the entries of the panel that has the most entries.

    Increases the height of the figure for the legend. Adds none if there is a single entry.
    """
    legends = [axes.get_legend_handles_labels() for axes in panels]
    handles, labels = max(legends, key=lambda legend: len(legend[1]))
    if len(labels) < 2:
        return
    width, height = figure.get_size_inches()
    entry_width = 0.6 + 0.075 * max(len(label) for label in labels)  # estimate in inches
    num_fitting = max(1, int(width // entry_width))
    columns = min(3, len(labels), num_fitting)
    rows = math.ceil(len(labels) / columns)
    figure.set_size_inches(width, height + 0.2 * rows)
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)


@themed
def plot_confusion(
    counts: npt.NDArray[np.int64], class_names: Sequence[str], *, unit: str = "images"
) -> Figure:
    """Draws a confusion matrix (K, K), and below it a list of the most frequent confusions.

    ``counts[i, j]`` is the number of objects of class i that were predicted as class j. ``unit``
    names what is counted.
    """
    num_classes = len(class_names)
    names = []
    for name in class_names:
        printable = "".join(letter if letter.isprintable() else "?" for letter in name)
        names.append(to_text(printable, max_length=26))
    side = float(np.clip(0.11 * num_classes, 3.6, 9.0))  # of the matrix, in inches
    confusions = find_confusions(counts)[: min(_MAX_CONFUSIONS, int(5 * side))]
    height_of_list = 0.4 + 0.19 * len(confusions)  # inches
    figure = start_figure(height=side + 1.8 + height_of_list, width=side + 1.8)
    matrix, text = figure.subplots(2, 1, height_ratios=(side + 1.8, height_of_list))

    shares = counts / counts.sum(axis=1).clip(min=1)[:, None]  # of the row
    strength = np.sqrt(shares)[..., None]  # (K, K, 1); the root makes small shares visible
    blue = np.array([0.12, 0.44, 0.92])
    red = np.array([0.84, 0.27, 0.31])
    is_correct = np.eye(num_classes, dtype=bool)[..., None]  # (K, K, 1)
    color = np.where(is_correct, blue, red)  # (K, K, 3)
    white = 1
    matrix.imshow(white - strength * (white - color))
    matrix.grid(visible=False)
    matrix.set_xlabel("predicted class")
    matrix.set_ylabel("class")
    if num_classes <= _MAX_TICK_LABELS:
        font_size = 8 if num_classes <= 60 else 5
        matrix.set_xticks(range(num_classes), names, rotation=90, fontsize=font_size)
        matrix.set_yticks(range(num_classes), names, fontsize=font_size)
    if num_classes <= _MAX_WRITTEN_CLASSES:
        for i, j in np.argwhere(counts):
            text_color = "white" if shares[i, j] > 0.5 else TEXT_COLOR
            matrix.text(j, i, f"{counts[i, j]:,}", ha="center", va="center", color=text_color)

    total = int(counts.sum())
    lines = [f"Most confused ({total - counts.trace():,} of {total:,} {unit} are wrong)", ""]
    for i, j, count in confusions:
        lines.append(f"{names[i]} → {names[j]}:  {count:,} of {counts[i].sum():,}")
    text.set_axis_off()
    text.text(0, 1, "\n".join(lines), fontsize=8, va="top", linespacing=1.5, color=TEXT_COLOR)
    return figure


@themed
def plot_grid(
    rows: Sequence[Sequence[RGBImage]],
    *,
    column_names: Sequence[str],
    row_names: Sequence[str] = (),
    note: str = "",
) -> Figure:
    """Draws images of the same size in a grid at full resolution.

    Args:
        rows: rows of RGB images (H, W, 3). A row may have fewer images than there are columns.
        column_names: names above the columns.
        row_names: names to the left of the rows.
        note: text below the grid.
    """
    height, width = rows[0][0].shape[:2]
    # The distance between neighboring images, from corner to corner.
    step_y = height + _GAP
    step_x = width + _GAP
    mosaic = np.full((len(rows) * step_y, len(column_names) * step_x, 3), 255, dtype=np.uint8)
    for i, row in enumerate(rows):
        for j, image in enumerate(row):
            top = i * step_y
            left = j * step_x
            mosaic[top : top + height, left : left + width] = image
    mosaic = mosaic[:-_GAP, :-_GAP]  # no gap behind the last row and column
    figure = Figure(figsize=(mosaic.shape[1] / _DPI["jpg"], mosaic.shape[0] / _DPI["jpg"]))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.imshow(mosaic, interpolation="none", aspect="auto")
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    axes.xaxis.tick_top()
    names = [to_text(name) for name in column_names]
    axes.set_xticks([j * step_x + width / 2 for j in range(len(names))], names)
    axes.set_yticks([i * step_y + height / 2 for i in range(len(row_names))], row_names)
    axes.tick_params(length=0, labelsize=8, labelcolor=TEXT_COLOR)
    if note:
        axes.set_xlabel(note, loc="left", fontsize=8)
    return figure


@themed
def chart_image(figure: Figure, *, caption: str = "", format: Format = "svg") -> Image:
    """Encodes a matplotlib figure. The caption is also the alternative text.

    The same figure always results in the same bytes.
    """
    buffer = io.BytesIO()
    options: dict[str, Any] = {"dpi": _DPI[format]}
    if format == "svg":
        options["metadata"] = {"Date": None}  # otherwise the file would state the current time
    if figure.get_layout_engine() is None:
        options |= {"bbox_inches": "tight", "pad_inches": 0.08}
    with warnings.catch_warnings():
        # The font lacks some letters, and a legend may be longer than its chart.
        warnings.filterwarnings("ignore", message=r"Glyph \d+")
        warnings.filterwarnings("ignore", message="constrained_layout not applied")
        figure.savefig(buffer, format=format, **options)
    return Image(buffer.getvalue(), _MEDIA_TYPES[format], caption, caption)


def to_rgb(image: Tensor, pixel_format: str) -> npt.NDArray[np.float32]:
    """Converts an image (3, H, W) in ``pixel_format`` ("RGB" or "BGR") to RGB (H, W, 3), float32.

    The values do not change.
    """
    pixels: npt.NDArray[np.float32] = image.detach().cpu().float().permute(1, 2, 0).numpy()
    if pixel_format == "BGR":
        pixels = pixels[..., ::-1]
    return pixels


def resize_longest_side(image: RGBImage, side: int) -> RGBImage:
    """Resizes an image (H, W, 3) so that its longer side has ``side`` pixels."""
    height, width = image.shape[:2]
    scale = side / max(height, width)
    new_size = (max(1, round(width * scale)), max(1, round(height * scale)))  # OpenCV's order
    interpolation = cv2.INTER_AREA if scale < 1 else cv2.INTER_CUBIC
    return np.asarray(cv2.resize(image, new_size, interpolation=interpolation), dtype=np.uint8)


def crop_box(image: RGBImage, box: npt.NDArray[Any], color: Color, side: int) -> RGBImage:
    """Crops an image to a box (4,), XYXY in pixels, and draws the box.

    The margin is half the longer side of the box, and at least 24 pixels. The longer side of the
    result has ``side`` pixels.
    """
    height, width = image.shape[:2]
    margin = max(24.0, float(np.max(box[2:] - box[:2])) / 2)
    top_left = np.floor(box[:2] - margin)
    bottom_right = np.ceil(box[2:] + margin)
    # The crop has at least one pixel, even if the box lies outside the image.
    x0, y0 = np.clip(top_left, 0, [width - 1, height - 1]).astype(int)
    x1, y1 = np.clip(bottom_right, [x0 + 1, y0 + 1], [width, height]).astype(int)
    crop = image[y0:y1, x0:x1]
    scale = side / max(crop.shape[:2])
    resized = resize_longest_side(crop, side)
    box_in_crop = (box - [x0, y0, x0, y0]) * scale
    return draw_boxes(resized, box_in_crop[None], [""], [color], min_side=0)


def overlay_map(image: RGBImage, values: npt.ArrayLike, *, stride: float, high: float) -> RGBImage:
    """Converts an image (H, W, 3) to gray, and draws a feature map (h, w) over it in colors.

    The color scale goes from 0 to ``high``. Each position of the feature map is the center of a
    square of ``stride`` pixels of the image, and ``stride`` may be fractional. Values between the
    centers are interpolated linearly.
    """

    def find_positions(length: int) -> npt.NDArray[np.float32]:
        """Returns the fractional index in the feature map of each pixel of a side."""
        pixels = np.arange(length, dtype=np.float32)
        return (pixels + 0.5) / np.float32(stride) - np.float32(0.5)

    height, width = image.shape[:2]
    columns, rows = np.meshgrid(find_positions(width), find_positions(height))  # (H, W) each
    interpolated = cv2.remap(
        np.asarray(values, dtype=np.float32),
        columns,
        rows,
        cv2.INTER_LINEAR,
        borderMode=cv2.BORDER_REPLICATE,  # the outermost values continue to the border
    )
    colormap = matplotlib.colormaps["viridis"]
    colored = colormap(np.clip(interpolated / high, 0, 1), bytes=True)[..., :3]  # without alpha
    gray = cv2.cvtColor(image, cv2.COLOR_RGB2GRAY)
    gray = cv2.cvtColor(gray, cv2.COLOR_GRAY2RGB)
    mixed = cv2.addWeighted(np.ascontiguousarray(colored), 0.65, gray, 0.35, 0)
    return np.asarray(mixed, dtype=np.uint8)


def tile_images(images: Sequence[RGBImage], *, columns: int) -> RGBImage:
    """Tiles images of any sizes row by row, and centers each in a cell of the largest size."""
    columns = min(columns, len(images))
    rows = math.ceil(len(images) / columns)
    gap = 2 * _GAP  # pixels
    cell_height = max(image.shape[0] for image in images)
    cell_width = max(image.shape[1] for image in images)
    # The distance between neighboring cells, from corner to corner.
    step_y = cell_height + gap
    step_x = cell_width + gap
    sheet_height = rows * step_y - gap  # no gap behind the last row
    sheet_width = columns * step_x - gap
    sheet = np.full((sheet_height, sheet_width, 3), BACKGROUND, dtype=np.uint8)
    for index, image in enumerate(images):
        row, column = divmod(index, columns)
        height, width = image.shape[:2]
        top = row * step_y + (cell_height - height) // 2
        left = column * step_x + (cell_width - width) // 2
        sheet[top : top + height, left : left + width] = image
    return sheet


def add_heading(image: RGBImage, text: str) -> RGBImage:
    """Adds a line of text above an image (H, W, 3), in a smaller font if it is long."""
    height, width = image.shape[:2]
    font_size = max(12, min(20, round(min(height, width) / 28)))  # pixels
    strip = PIL.Image.new("RGB", (width, round(1.6 * font_size)), BACKGROUND)
    middle = 0.8 * font_size  # of the strip's height
    pen = PIL.ImageDraw.Draw(strip)
    while font_size > 9 and pen.textlength(text, font=get_font(font_size)) > width - 8:
        font_size -= 1
    pen.text((4, middle), text, font=get_font(font_size), fill=_HEADING_COLOR, anchor="lm")
    return np.concatenate([np.asarray(strip), image])
