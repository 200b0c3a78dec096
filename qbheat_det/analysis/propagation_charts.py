# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Charts of carried features over the distance, for QB-Heat's Eq. 3."""

from collections.abc import Mapping, Sequence

from .charts import INK, LINE, Format, Theme, encode, list_styles, start_figure, to_text

_DECADE = 15  # below it, powers of ten alone would say too little


def plot_over_distance(
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    *,
    title: str,
    label: str,
    level: float,
    level_label: str,
    theme: Theme = "light",
    format: Format = "svg",
) -> bytes:
    """Draws a line for each of several quantities over the distance, upright on a log scale.

    Args:
        curves: by name distances, in sides of the image, and values above 0.
        title: of the chart.
        label: of the values.
        level: what is to be compared with; dashed.
        level_label: what it is.
        theme: of the page.
        format: of the file.
    """
    figure, axes = start_figure(theme, height=3.6)
    for (name, (x, y)), style in zip(curves.items(), list_styles(theme, len(curves)), strict=True):
        axes.plot(x, y, label=to_text(name), lw=1.6, ms=3.5, **style)
    axes.axhline(level, color=INK[theme], lw=1, ls="--", label=level_label)
    axes.set_yscale("log")
    # Plain numbers, between powers of ten too.
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}" if _spans_little(curves) else "")
    axes.tick_params(
        axis="y", which="both", length=0, labelsize=9, colors=axes.yaxis.label.get_color()
    )
    axes.set_title(title, fontsize=10, loc="left", color=INK[theme])
    axes.set_xlabel("distance, sides of the image")
    axes.set_ylabel(label)
    axes.grid(color=LINE[theme])
    axes.legend(frameon=False, labelcolor=INK[theme], fontsize=8)
    return encode(figure, theme, format)


def _spans_little(curves: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> bool:
    values = [value for _, y in curves.values() for value in y if value > 0]
    return bool(values) and max(values) < _DECADE * min(values)
