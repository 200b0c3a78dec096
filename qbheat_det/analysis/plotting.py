# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Charts and image grids. Functions decorated with ``@themed`` use the same matplotlib theme."""

import io
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

INK, QUIET = "#1c1e21", "#63676e"
"""Colors of text and of axes."""
COLORS = ("#1f6feb", "#a83300", "#00ab62", "#a23098", "#d48000", "#44534c")
"""Line colors in order of use. The theme has the same colors."""
HEADING: Color = (226, 228, 232)
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_DASHES = ("-", "--", ":", "-.")
_LONGEST_NAME = 40
_MOST_NAMED, _MOST_LISTED = 110, 30  # in a confusion matrix: named classes, listed confusions
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
    """Returns the color, dash and marker of ``number`` lines. The first 24 are different."""
    return [
        {
            "color": COLORS[index % len(COLORS)],
            "linestyle": _DASHES[index // len(COLORS) % len(_DASHES)],
            "marker": _MARKERS[index % len(_MARKERS)],
        }
        for index in range(number)
    ]


def to_text(name: str, *, longest: int = _LONGEST_NAME) -> str:
    """Escapes a name for matplotlib and replaces the middle of a long name by an ellipsis."""
    text = " ".join(name.encode(errors="backslashreplace").decode().split())
    if len(text) > longest:
        end = (longest - 1) // 2
        text = f"{text[: longest - 1 - end]}…{text[-end:]}"
    text = text.replace("$", r"\$")  # $ starts a formula; a leading underscore hides a label
    return f" {text}" if text.startswith("_") else text


@themed
def add_legend(figure: Figure, *panels: Axes) -> None:
    """Adds a legend below all panels, with the entries of the panel that has the most entries.

    Increases the height of the figure. Adds no legend for a single entry.
    """
    entries = [axes.get_legend_handles_labels() for axes in panels]
    handles, labels = max(entries, key=lambda entry: len(entry[1]))
    if len(labels) < 2:
        return
    width, height = figure.get_size_inches()
    columns = int(min(3, len(labels), max(1, width // (0.6 + 0.075 * max(map(len, labels))))))
    figure.set_size_inches(width, height + 0.2 * -(-len(labels) // columns))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)


@themed
def plot_confusion(
    counts: npt.NDArray[np.int64], class_names: Sequence[str], *, unit: str = "images"
) -> Figure:
    """Draws a confusion matrix (K, K) and a list of the most frequent confusions."""
    number = len(class_names)
    printable = ["".join(c if c.isprintable() else "?" for c in name) for name in class_names]
    names = [to_text(name, longest=26) for name in printable]
    side = float(np.clip(0.11 * number, 3.6, 9.0))
    figure = start_figure(height=side + 1.8, width=side + 6.5)
    axes, text = figure.subplots(1, 2, width_ratios=(side + 1.8, 4.7))
    shares = counts / counts.sum(axis=1).clip(min=1)[:, None]
    strength = np.sqrt(shares)[..., None]
    wrong, correct = np.array([0.84, 0.27, 0.31]), np.array([0.12, 0.44, 0.92])
    color = np.where(np.eye(number, dtype=bool)[..., None], correct, wrong)
    axes.imshow(1 - strength * (1 - color))
    axes.grid(visible=False)
    axes.set_xlabel("predicted class")
    axes.set_ylabel("class")
    if number <= _MOST_NAMED:
        size = 8 if number <= 60 else 5
        axes.set_xticks(range(number), names, rotation=90, fontsize=size)
        axes.set_yticks(range(number), names, fontsize=size)
    total = int(counts.sum())
    lines = [f"Most confused ({total - counts.trace():,} of {total:,} {unit} are wrong)", ""]
    for i, j, count in find_confusions(counts)[: min(_MOST_LISTED, int(5 * side))]:
        lines.append(f"{names[i]} → {names[j]}:  {count:,} of {counts[i].sum():,}")
    text.set_axis_off()
    text.text(0, 1, "\n".join(lines), fontsize=8, va="top", linespacing=1.5, color=INK)
    return figure


@themed
def plot_grid(
    rows: Sequence[Sequence[RGBImage]],
    *,
    column_names: Sequence[str],
    row_names: Sequence[str] = (),
    note: str = "",
) -> Figure:
    """Draws images of the same size in a grid at full resolution. Short rows are left blank."""
    height, width = rows[0][0].shape[:2]
    step_y, step_x = height + _GAP, width + _GAP
    mosaic = np.full((len(rows) * step_y, len(column_names) * step_x, 3), 255, dtype=np.uint8)
    for i, row in enumerate(rows):
        for j, image in enumerate(row):
            mosaic[i * step_y :, j * step_x :][:height, :width] = image
    mosaic = mosaic[:-_GAP, :-_GAP]
    figure = Figure(figsize=(mosaic.shape[1] / _DPI["jpg"], mosaic.shape[0] / _DPI["jpg"]))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.imshow(mosaic, interpolation="none", aspect="auto")
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    axes.xaxis.tick_top()
    names = [to_text(name) for name in column_names]
    axes.set_xticks([j * step_x + width / 2 for j in range(len(names))], names)
    axes.set_yticks([i * step_y + height / 2 for i in range(len(row_names))], row_names)
    axes.tick_params(length=0, labelsize=8, labelcolor=INK)
    if note:
        axes.set_xlabel(note, loc="left", fontsize=8)
    return figure


@themed
def chart_image(figure: Figure, *, caption: str = "", format: Format = "svg") -> Image:
    """Encodes a matplotlib figure deterministically. The caption is also the alternative text."""
    buffer = io.BytesIO()
    options: dict[str, Any] = {"dpi": _DPI[format]}
    if format == "svg":
        options["metadata"] = {"Date": None}
    if figure.get_layout_engine() is None:
        options |= {"bbox_inches": "tight", "pad_inches": 0.08}
    with warnings.catch_warnings():
        # The font lacks some letters, and a legend may be longer than its chart.
        warnings.filterwarnings("ignore", message=r"Glyph \d+")
        warnings.filterwarnings("ignore", message="constrained_layout not applied")
        figure.savefig(buffer, format=format, **options)
    return Image(buffer.getvalue(), _MEDIA_TYPES[format], caption, caption)


def to_rgb(image: Tensor, pixel_format: str) -> npt.NDArray[np.float32]:
    """Converts (3, H, W) in ``pixel_format`` ("RGB" or "BGR") to RGB (H, W, 3) in float32."""
    pixels: npt.NDArray[np.float32] = image.detach().cpu().float().permute(1, 2, 0).numpy()
    return pixels[..., ::-1] if pixel_format == "BGR" else pixels


def shrink(image: RGBImage, longest: int) -> RGBImage:
    """Resizes an image (H, W, 3) so that its longer side has ``longest`` pixels."""
    factor = longest / max(image.shape[:2])
    height, width = (max(1, round(length * factor)) for length in image.shape[:2])
    way = cv2.INTER_AREA if factor < 1 else cv2.INTER_CUBIC
    return np.asarray(cv2.resize(image, (width, height), interpolation=way), dtype=np.uint8)


def crop_box(image: RGBImage, box: npt.NDArray[Any], color: Color, longest: int) -> RGBImage:
    """Crops an image to a box (4,), XYXY in pixels, and draws the box.

    The margin is half the longer side of the box. The longer side of the result has ``longest``
    pixels.
    """
    height, width = image.shape[:2]
    margin = max(24.0, float(np.max(box[2:] - box[:2])) / 2)
    low = np.clip(np.floor(box[:2] - margin), 0, [width - 1, height - 1]).astype(int)
    high = np.clip(np.ceil(box[2:] + margin), low + 1, [width, height]).astype(int)
    part = image[low[1] : high[1], low[0] : high[0]]
    shifted = (box - np.tile(low, 2))[None] * (longest / max(part.shape[:2]))
    return draw_boxes(shrink(part, longest), shifted, [""], [color], min_side=0)


def overlay_map(image: RGBImage, values: npt.ArrayLike, *, stride: float, high: float) -> RGBImage:
    """Converts an image to gray, and draws an interpolated feature map (h, w) over it.

    The color scale goes from 0 to ``high``. Positions of the feature map are ``stride`` pixels
    apart, which may be fractional. The first position is half a stride away from the corner.
    """
    x, y = (
        (np.arange(length, dtype=np.float32) + 0.5) / np.float32(stride) - np.float32(0.5)
        for length in (image.shape[1], image.shape[0])
    )
    columns, rows = np.meshgrid(x, y)
    # Replicates the outermost values at the border.
    small, edge = np.asarray(values, dtype=np.float32), cv2.BORDER_REPLICATE
    smooth = cv2.remap(small, columns, rows, cv2.INTER_LINEAR, borderMode=edge)
    colored = matplotlib.colormaps["viridis"](np.clip(smooth / high, 0, 1), bytes=True)[..., :3]
    grey = cv2.cvtColor(cv2.cvtColor(image, cv2.COLOR_RGB2GRAY), cv2.COLOR_GRAY2RGB)
    mixed = cv2.addWeighted(np.ascontiguousarray(colored), 0.65, grey, 0.35, 0)
    return np.asarray(mixed, dtype=np.uint8)


def tile_images(images: Sequence[RGBImage], *, columns: int) -> RGBImage:
    """Tiles images of any sizes row by row. Each image is centered in a cell of the same size."""
    columns = min(columns, len(images))
    rows = -(-len(images) // columns)
    step = np.max([image.shape[:2] for image in images], axis=0) + 2 * _GAP
    sheet = np.full((*(step * (rows, columns) - 2 * _GAP), 3), BACKGROUND, dtype=np.uint8)
    for index, image in enumerate(images):
        place = step * divmod(index, columns)
        top, left = place + (step - 2 * _GAP - image.shape[:2]) // 2
        sheet[top:, left:][: image.shape[0], : image.shape[1]] = image
    return sheet


def add_heading(image: RGBImage, text: str) -> RGBImage:
    """Adds a line of text above an image (H, W, 3), in a smaller font if it is long."""
    width = image.shape[1]
    size = max(12, min(20, round(min(image.shape[:2]) / 28)))
    strip = PIL.Image.new("RGB", (width, round(1.6 * size)), BACKGROUND)
    pen, middle = PIL.ImageDraw.Draw(strip), 0.8 * size
    while size > 9 and pen.textlength(text, font=get_font(size)) > width - 8:
        size -= 1
    pen.text((4, middle), text, font=get_font(size), fill=HEADING, anchor="lm")
    return np.concatenate([np.asarray(strip), image])
