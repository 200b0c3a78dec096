# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Class activation beside steady heat, as pictures: after the top of Fig. 1 of arXiv:2211.13228.

One scale of colours for a row, from the lowest of the class activation map to its highest; the
colours are matplotlib's "inferno", of even steps to the eye and told apart without colour vision.
"""

from collections.abc import Mapping, Sequence

import cv2
import matplotlib
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image, ImageDraw

from .charts import INK, LINE, Format, Theme, encode, list_colors, style_axes
from .detection_pictures import BACKGROUND, HEADING, RGBImage, get_font
from .reconstruction_pictures import draw_sheet
from .steady_heat import HeatStudy

COLORS = "inferno"
LABELS = {
    "steady": "steady heat",
    "with_source": "with a source",
    "corners": "between corners",
    "border_mean": "mean of border",
    "shuffled": "shuffled map",
}
"""Of the agreements of a ``HeatStudy``, in the order of the charts."""
_OPACITY = 0.55  # of colours over an image


def paint(values: npt.ArrayLike, low: float, high: float) -> RGBImage:
    """Returns (H, W, 3): ``low`` and all below it dark, ``high`` and all above it bright."""
    share = (np.asarray(values, dtype=np.float64) - low) / max(high - low, 1e-12)
    colored: RGBImage = matplotlib.colormaps[COLORS](np.clip(share, 0, 1), bytes=True)[..., :3]
    return np.ascontiguousarray(colored)


def lay_over(image: RGBImage, values: npt.ArrayLike, low: float, high: float) -> RGBImage:
    """Returns the image (S, S, 3) in grey with a map (H, W) over it, smoothed between positions."""
    size = image.shape[1], image.shape[0]
    smooth = cv2.resize(np.asarray(values, dtype=np.float64), size, interpolation=cv2.INTER_CUBIC)
    grey = cv2.cvtColor(cv2.cvtColor(image, cv2.COLOR_RGB2GRAY), cv2.COLOR_GRAY2RGB)
    return cv2.addWeighted(paint(smooth, low, high), _OPACITY, grey, 1 - _OPACITY, 0)


def draw_heat_sheet(
    images: Sequence[RGBImage],
    maps: Sequence[npt.ArrayLike],
    studies: Sequence[HeatStudy],
    names: Sequence[str],
) -> RGBImage:
    """Returns a row for each image: image, map over it, map, steady heat, the same with a source.

    Args:
        images: (S, S, 3), all of one size.
        maps: class activation (H, W) of each.
        studies: of each map.
        names: of each row, such as the class and its score.
    """
    columns: dict[str, list[RGBImage]] = {
        title: []
        for title in ("image", "CAM over it", "CAM", "steady heat", "… with a source", "logits")
    }
    for image, values, study in zip(images, maps, studies, strict=True):
        low, high = float(np.min(values)), float(np.max(values))
        size = image.shape[1], image.shape[0]
        blocks = [
            cv2.resize(paint(found, low, high), size, interpolation=cv2.INTER_NEAREST)
            for found in (np.asarray(values), study.steady, study.with_source)
        ]
        bar = _draw_bar(*size, low, high)
        row = [image, lay_over(image, values, low, high), *blocks, bar]
        for pictures, picture in zip(columns.values(), row, strict=True):
            pictures.append(picture)
    return draw_sheet(
        columns,
        names=names,
        note="Steady heat has the CAM's border; the source is the CAM's hottest position inside.",
    )


def plot_agreements(
    agreements: Mapping[str, Mapping[str, Sequence[Mapping[str, float | None]]]],
    *,
    theme: Theme = "light",
    format: Format = "svg",
) -> bytes:
    """Draws median and quartiles over images of correlation and relative error, a mark a subject.

    Args:
        agreements: by subject and by the keys of ``LABELS``, for each image what
            ``Agreement.to_dict`` gives.
        theme: of the page.
        format: of the file.
    """
    figure = Figure(figsize=(7.6, 2.4 + 0.5 * len(agreements)))
    figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.12)
    panels = figure.subplots(1, 2, sharey=True)
    _draw_marks(panels[0], agreements, "correlation", theme)
    _draw_marks(panels[1], agreements, "relative_error", theme)
    panels[0].set_title(
        "CAM and what is made of its border", fontsize=10, loc="left", color=INK[theme]
    )
    panels[0].set_xlabel("correlation inside (1: the same shape)")
    panels[1].set_xlabel("relative error inside (1: as the map's mean)")
    panels[0].set_yticks(range(len(LABELS)), LABELS.values())
    panels[0].invert_yaxis()
    if len(agreements) > 1:
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(
            handles, labels, loc="outside lower center", frameon=False,
            labelcolor=INK[theme], fontsize=8,
        )  # fmt: skip
    return encode(figure, theme, format)


def _draw_marks(
    axes: Axes,
    agreements: Mapping[str, Mapping[str, Sequence[Mapping[str, float | None]]]],
    figure_name: str,
    theme: Theme,
) -> None:
    style_axes(axes, theme)
    colors = list_colors(theme)
    for index, (subject, kinds) in enumerate(agreements.items()):
        label: str | None = subject
        for row, kind in enumerate(LABELS):
            found = [one[figure_name] for one in kinds[kind]]
            known = [value for value in found if value is not None]
            if not known:
                continue
            first, median, third = np.percentile(known, (25, 50, 75)).tolist()
            axes.errorbar(
                [median], [row + 0.16 * (index - (len(agreements) - 1) / 2)],
                xerr=[[median - first], [third - median]], label=label,
                color=colors[index % len(colors)], marker="os^Dv"[index % 5], ms=6, lw=1.8,
                ls="none",
            )  # fmt: skip
            label = None
    axes.tick_params(axis="y", labelcolor=INK[theme])
    axes.grid(axis="x", color=LINE[theme])


def _draw_bar(width: int, height: int, low: float, high: float) -> RGBImage:
    """Returns a cell with a scale of colours, its ends in logits."""
    cell = Image.new("RGB", (width, height), BACKGROUND)
    size = max(8, round(width / 9))
    top, bottom = round(1.2 * size), height - round(1.2 * size)
    scale = paint(np.linspace(high, low, bottom - top)[:, None], low, high)
    left = round(0.4 * width)
    bar = Image.fromarray(scale).resize((round(0.2 * width), bottom - top))
    cell.paste(bar, (left, top))
    pen, middle = ImageDraw.Draw(cell), width / 2
    pen.text((middle, 2), f"{high:.3g}", font=get_font(size), fill=HEADING, anchor="mt")
    pen.text((middle, height - 2), f"{low:.3g}", font=get_font(size), fill=HEADING, anchor="mb")
    return np.asarray(cell)
