# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The picture of how cost grows: a panel for each thing that grows, its slopes in the legend."""

import math
from collections.abc import Mapping
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from qbheat_det.analysis.charts import INK, LINE, encode, list_styles, style_axes

Curves = Mapping[str, Mapping[float, float]]
_LABELS = {  # of the panels' axes, and whether these are logarithmic
    "pixels": ("million pixels of an image", "seconds", True),
    "batch": ("images of a batch, 320 x 320", "seconds", True),
    "queries": ("queries, 640 x 640", "seconds", False),
    "processes": ("processes, one thread each", "images per second", False),
}


def slope(points: Mapping[float, float]) -> float:
    """Returns the power with which y grows: the slope of a line through the logarithms.

    Args:
        points: y of at least two x.
    """
    xs, ys = ([math.log(value) for value in side] for side in (points, points.values()))
    x_mean, y_mean = sum(xs) / len(xs), sum(ys) / len(ys)
    above = sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True))
    return above / sum((x - x_mean) ** 2 for x in xs)


def plot_growth(
    panels: Mapping[str, Curves],
    titles: Mapping[str, str],
    *,
    theme: Literal["light", "dark"] = "light",
    format: Literal["svg", "png"] = "svg",
) -> bytes:
    """Draws a panel for each thing that grows.

    Args:
        panels: by the thing that grows and what was measured, y of each x.
        titles: of what was measured, for people.
        theme: of the page.
        format: of the file.
    """
    figure = Figure(figsize=(9.6, 3.9 * math.ceil(len(panels) / 2)))
    figure.set_layout_engine("constrained", w_pad=0.16, h_pad=0.16)
    axes_of = list(figure.subplots(math.ceil(len(panels) / 2), 2, squeeze=False).flat)
    for axes, (axis, curves) in zip(axes_of, panels.items(), strict=False):
        _draw(axes, axis, curves, titles, theme)
    for axes in axes_of[len(panels) :]:
        axes.set_visible(False)
    return encode(figure, theme, format)


def _draw(
    axes: Axes,
    axis: str,
    curves: Curves,
    titles: Mapping[str, str],
    theme: Literal["light", "dark"],
) -> None:
    style_axes(axes, theme)
    styles = list_styles(theme, len(curves))
    for style, (name, points) in zip(styles, curves.items(), strict=True):
        label = f"{titles.get(name, name)}: {slope(points):.2f}"
        axes.plot(list(points), list(points.values()), label=label, ms=4, lw=1.8, **style)
    x_label, y_label, logarithmic = _LABELS[axis]
    if logarithmic:
        axes.set_xscale("log")
        axes.set_yscale("log")
    xs = sorted({x for points in curves.values() for x in points})
    axes.set_xticks(xs, [f"{x:.3g}" for x in xs])
    axes.minorticks_off()
    if not logarithmic:
        axes.set_ylim(bottom=0)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(color=LINE[theme])
    place = "upper left" if logarithmic else "lower left"
    legend = axes.legend(
        frameon=False, labelcolor=INK[theme], fontsize=8, title="slope", loc=place, alignment="left"
    )
    legend.get_title().set_color(INK[theme])
    legend.get_title().set_fontsize(8)
