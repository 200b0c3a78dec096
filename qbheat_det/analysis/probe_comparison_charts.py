# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Charts of probes of several backbones: by decoder (Fig. 8) and by images seen (Fig. 6)."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .charts import INK, LINE, Format, Theme, encode, list_styles, start_figure, to_text
from .probe_results import Decoder, Point

_WIDTH = 5.2  # inches: small, so that letters stay legible on a phone
_SPREAD = 0.5  # of a decoder's place, for the points of all series beside each other
_LEGEND_COLUMNS = 2


def plot_by_decoder(
    points: Mapping[str, Mapping[Decoder, Point]],
    *,
    theme: Theme = "light",
    format: Format = "svg",
) -> bytes:
    """Draws top-1 under each decoder, the weakest on the left, with bars of one standard error.

    A line joins the widths of decoders that are else the same; nothing lies between other decoders.

    Args:
        points: by the series' names, as of ``place_by_decoder``.
        theme: of the page.
        format: of the file.
    """
    decoders = sorted({decoder for own in points.values() for decoder in own})
    place = {decoder: index for index, decoder in enumerate(decoders)}
    figure, axes = start_figure(theme, height=3.2 + _legend_height(points), width=_WIDTH)
    styles = list_styles(theme, len(points))
    for index, ((name, own), style) in enumerate(zip(points.items(), styles, strict=True)):
        shift = _SPREAD * ((index + 0.5) / len(points) - 0.5)
        label: str | None = to_text(name)
        for _, same in itertools.groupby(sorted(own), key=lambda decoder: decoder.name):
            run = list(same)
            _draw(axes, [place[decoder] + shift for decoder in run],
                  [own[decoder] for decoder in run], style, label)  # fmt: skip
            label = None  # one line of the legend each
    axes.set_xticks(range(len(decoders)), [_break(decoder) for decoder in decoders])
    axes.tick_params(axis="x", labelcolor=INK[theme])
    axes.set_xlim(-0.5, len(decoders) - 0.5)
    _finish(figure, axes, "Top-1 by decoder", "decoder on the frozen backbone", theme, len(points))
    return encode(figure, theme, format)


def plot_by_images(
    points: Mapping[str, Mapping[int, Point]],
    *,
    title: str,
    series: Sequence[str],
    theme: Theme = "light",
    format: Format = "svg",
) -> bytes:
    """Draws top-1 under one decoder against images seen, with bars of one standard error.

    A line joins the checkpoints of one series, none joins two. Random backbones, which have seen
    no image, are level lines.

    Args:
        points: by the series' names, as of ``place_by_images``.
        title: of the decoder.
        series: all names, so that each keeps its colour and marker from chart to chart.
        theme: of the page.
        format: of the file.
    """
    figure, axes = start_figure(theme, height=3.2 + _legend_height(points), width=_WIDTH)
    styles = dict(zip(series, list_styles(theme, len(series)), strict=True))
    for name, own in points.items():
        style = styles[name]
        seen = [number for number in own if number]
        if seen:
            _draw(axes, seen, [own[number] for number in seen], style, to_text(name))
        else:
            axes.axhline(own[0].top1, label=to_text(name), color=style["color"], lw=1.4, ls="--")
    axes.set_xlim(left=0)
    axes.margins(x=0.08)
    _finish(figure, axes, f"Top-1 by {title}", "images seen in pre-training", theme, len(points))
    return encode(figure, theme, format)


def _draw(
    axes: Axes,
    x: Sequence[float],
    points: Sequence[Point],
    style: Mapping[str, Any],
    label: str | None,
) -> None:
    axes.errorbar(
        x,
        [point.top1 for point in points],
        yerr=[point.error for point in points],
        label=label,
        lw=1.6,
        ms=5,
        elinewidth=1,
        **style,
    )


def _finish(
    figure: Figure, axes: Axes, title: str, x_label: str, theme: Theme, number: int
) -> None:
    axes.set_title(title, fontsize=11, loc="left", color=INK[theme])
    axes.set_xlabel(x_label)
    axes.set_ylabel("top-1 (%)")
    axes.set_ylim(0, max(1.0, 1.08 * axes.dataLim.y1))  # bars of errors included
    axes.grid(axis="y", color=LINE[theme])
    if number > 1:
        figure.legend(loc="outside lower center", ncols=_LEGEND_COLUMNS, fontsize=8,
                      frameon=False, labelcolor=INK[theme])  # fmt: skip


def _legend_height(points: Mapping[str, object]) -> float:
    return 0.2 * -(-len(points) // _LEGEND_COLUMNS)


def _break(decoder: Decoder) -> str:
    return f"{decoder.name}\n{decoder.width}" if decoder.width else decoder.name
