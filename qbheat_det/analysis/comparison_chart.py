# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The picture of a comparison of objectives: a panel a measure, a row an objective."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .charts import INK, LINE, Format, Theme, encode, list_colors, style_axes
from .comparison_summary import RANDOM, Spread, list_measures, summarise_all

_COLUMNS = 3


def plot_comparison(
    results: Sequence[Mapping[str, Any]],
    objectives: Sequence[str],
    *,
    theme: Theme = "light",
    format: Format = "svg",
) -> bytes | None:
    """Draws mean (dot), standard deviation over seeds (bar) and single seeds (small dots).

    The random encoder is a level line through its panel, as is what it takes to be better.

    Args:
        results: of single stages.
        objectives: rows, the first on top.
        theme: of the page.
        format: of the file.

    Returns:
        The file; None where nothing has been judged yet.
    """
    names = {k: v for k, v in list_measures(results).items() if not k.startswith("probes_as")}
    summary = summarise_all(results, objectives)
    if not names:
        return None
    columns = min(_COLUMNS, len(names))
    rows = math.ceil(len(names) / columns)
    figure = Figure(figsize=(1.6 + 3.2 * columns, rows * (0.9 + 0.32 * len(objectives))))
    figure.set_layout_engine("constrained", w_pad=0.1, h_pad=0.1)
    for index, (name, title) in enumerate(names.items()):
        axes = figure.add_subplot(rows, columns, index + 1)
        spreads = {row: figures[name] for row, figures in summary.items() if name in figures}
        _draw(axes, spreads, objectives, theme)
        axes.set_title(f"{title}, %", fontsize=10, loc="left")
        axes.set_yticks(range(len(objectives)), objectives if index % columns == 0 else [])
        axes.tick_params(axis="y", labelcolor=INK[theme])
    return encode(figure, theme, format)


def _draw(
    axes: Axes, spreads: Mapping[str, Spread], objectives: Sequence[str], theme: Theme
) -> None:
    style_axes(axes, theme)
    accent, level = list_colors(theme)[0], list_colors(theme)[-1]
    if RANDOM in spreads:
        axes.axvline(spreads[RANDOM].mean, color=level, lw=1.2, ls="--")
    for name, spread in spreads.items():
        row = objectives.index(name)
        color = level if name == RANDOM else accent
        width = 0.0 if math.isnan(spread.deviation) else spread.deviation
        axes.errorbar(
            spread.mean, row, xerr=width or None, fmt="o", color=color, ms=6, lw=1.6, capsize=3
        )
        axes.plot(
            list(spread.values.values()),
            [row + 0.22] * len(spread.values),
            *("o",),
            color=color,
            ms=2.5,
            alpha=0.7,
        )
    axes.set_ylim(len(objectives) - 0.5, -0.5)
    axes.grid(axis="x", color=LINE[theme])
