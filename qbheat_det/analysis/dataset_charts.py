# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Charts of datasets, several in one: boxes of each class, and how a measure is distributed."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes

from .charts import INK, LINE, Format, Theme, encode, list_colors, start_figure, to_texts

_BINS = 40
_LONGEST = 32  # letters of a name, unless two would be alike


def plot_counts(
    counts: Mapping[str, Mapping[str, int]], *, theme: Theme = "light", format: Format = "svg"
) -> bytes:
    """Draws horizontal bars, first name on top: ``counts[series][name]``, one colour a series.

    A bar is the share of its series, so that a small one can be compared with a large one; the
    count stands beside it.
    """
    names = list(dict.fromkeys(name for series in counts.values() for name in series))
    figure, axes = start_figure(
        theme, height=max(1.8, 0.9 + (0.14 + 0.14 * len(counts)) * len(names))
    )
    height = 0.8 / max(len(counts), 1)
    longest = 0.0
    for index, (series, values) in enumerate(counts.items()):
        total = max(sum(values.values()), 1)
        rows = [row - 0.4 + (index + 0.5) * height for row in range(len(names))]
        shares = [100 * values.get(name, 0) / total for name in names]
        longest = max([longest, *shares])
        color = list_colors(theme)[index % len(list_colors(theme))]
        axes.barh(rows, shares, height=0.9 * height, color=color, label=series)
        for name, row, share in zip(names, rows, shares, strict=True):
            text = f" {values.get(name, 0):,}"
            axes.text(share, row, text, va="center", fontsize=8, color=INK[theme])
    axes.set_yticks(range(len(names)), to_texts(names, longest=_LONGEST))
    axes.tick_params(axis="y", labelcolor=INK[theme])
    axes.set_xlim(0, 1.15 * longest or 1)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlabel("% of the boxes")
    axes.grid(axis="x", color=LINE[theme])
    _name_series(axes, len(counts), theme)
    return encode(figure, theme, format)


def plot_distribution(
    values: Mapping[str, Sequence[float]],
    *,
    label: str,
    log: bool = False,
    theme: Theme = "light",
    format: Format = "svg",
) -> bytes:
    """Draws a histogram of each series as a line, in percent of the series, over common bins.

    Args:
        values: numbers by the name of their series; positive with ``log``.
        label: what the numbers are.
        log: whether the bins widen as the numbers grow.
    """
    figure, axes = start_figure(theme, height=2.6)
    joined = [value for series in values.values() for value in series]
    low, high = min(joined), max(joined)
    high = high if high > low else low + 1
    steps = [i / _BINS for i in range(_BINS + 1)]
    edges = [low * (high / low) ** x if log else low + (high - low) * x for x in steps]
    edges[-1] = high  # which rounding may have lowered, and with it the largest number lost
    for index, (series, numbers) in enumerate(values.items()):
        weights = [100 / len(numbers)] * len(numbers)
        color = list_colors(theme)[index % len(list_colors(theme))]
        axes.hist(
            numbers, edges, weights=weights, histtype="step", color=color, lw=1.8, label=series
        )
    if log:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel(label)
    axes.set_ylabel("%")
    axes.grid(color=LINE[theme])
    _name_series(axes, len(values), theme)
    return encode(figure, theme, format)


def _name_series(axes: Axes, number: int, theme: Theme) -> None:
    if number > 1:
        axes.legend(frameon=False, labelcolor=INK[theme], fontsize=9)
