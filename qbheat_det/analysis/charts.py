# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Charts of a run, as SVG for a light or a dark page or as PNG: AP of each class, curves."""

import functools
import io
import itertools
import json
import logging
import math
import os
import re
import sys
import textwrap
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text

Theme = Literal["light", "dark"]
THEMES: tuple[Theme, ...] = get_args(Theme)
Format = Literal["svg", "png"]

INK = {"light": "#1c1e21", "dark": "#e8e9eb"}
_QUIET = {"light": "#63676e", "dark": "#9aa0a8"}
LINE = {"light": "#e4e4e1", "dark": "#2c2f35"}
_PAGE = {"light": "#ffffff", "dark": "#1a1c20"}
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_OTHERS = {
    "light": ("#a83300", "#00ab62", "#a23098", "#d48000", "#44534c"),
    "dark": ("#f0803c", "#6fe08e", "#a761a5", "#eeea6a", "#93a099"),
}
_ACCENT = {"light": "#1f6feb", "dark": "#6ea8fe"}
_LONGEST_NAME = 40
_LETTERS_MORE = 6  # of all names, as long as two are alike
_LEGEND_LINE, _LEGEND_LETTER, _LEGEND_MARK = 0.2, 0.075, 0.6  # inches
_MOST_COLUMNS = 3  # of a legend
_LETTERS_AN_INCH = 9  # of a label beside the axis of values, with some room
# What matplotlib says once a letter and theme, or of a chart too small for its names.
_NO_GLYPH = r"Glyph \d+"
_NO_ROOM = r"constrained_layout not applied"

logger = logging.getLogger(__name__)


def plot_class_ap(
    metrics: Mapping[str, float], *, theme: Theme = "light", format: Format = "svg"
) -> bytes:
    """Draws a bar for each ``AP-<class>`` of one task's metrics, best class on top.

    Classes without ground truth (nan) are named and have no bar.
    """
    found = {key[3:]: value for key, value in metrics.items() if key.startswith("AP-")}
    names = sorted(found, key=lambda name: -math.inf if math.isnan(found[name]) else found[name])
    figure, axes = start_figure(theme, height=max(1.8, 0.7 + 0.36 * len(names)))
    for row, name in enumerate(names):
        value = found[name]
        width = 0.0 if math.isnan(value) else value
        text = "no ground truth" if math.isnan(value) else f"{value:.1f}"
        axes.barh(row, width, height=0.62, color=_ACCENT[theme])
        axes.text(width + 1.2, row, text, va="center", fontsize=9, color=INK[theme])
    axes.set_yticks(range(len(names)), [to_text(name) for name in names])
    axes.tick_params(axis="y", labelcolor=INK[theme])
    axes.set_xlim(0, 108)
    axes.set_xticks(range(0, 101, 20))
    axes.set_xlabel("AP (%)")
    axes.grid(axis="x", color=LINE[theme])
    return encode(figure, theme, format)


def plot_curve(
    iterations: Sequence[float],
    values: Mapping[str, Sequence[float]],
    *,
    label: str,
    x_label: str = "iteration",
    levels: Mapping[str, float] | None = None,
    theme: Theme = "light",
    format: Format = "svg",
) -> bytes:
    """Draws one line per entry of ``values`` over the iterations; gaps where a value is nan.

    Args:
        iterations: of all lines, or whatever else is counted along x.
        values: one number each for every line.
        label: of the values.
        x_label: of what is counted along x.
        levels: values that do not depend on x, such as a baseline's; dashed.
        theme: of the page.
        format: of the file.
    """
    figure, axes = start_figure(theme, height=3.2)
    colors = list_colors(theme)
    dashes = itertools.cycle(("--", ":", "-."))
    for index, (name, line) in enumerate(values.items()):
        marker = "o" if len(iterations) < 25 else ""
        color = colors[index % len(colors)]
        axes.plot(iterations, line, label=to_text(name), color=color, lw=1.8, marker=marker, ms=4)
    for name, level in (levels or {}).items():
        axes.axhline(level, label=to_text(name), color=_QUIET[theme], lw=1.4, ls=next(dashes))
    if len(values) + len(levels or {}) > 1:
        axes.legend(frameon=False, labelcolor=INK[theme], fontsize=9)
    axes.set_ylim(bottom=0)
    axes.set_xlabel(x_label)
    axes.set_ylabel(label)
    axes.grid(color=LINE[theme])
    return encode(figure, theme, format)


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Reads the ``metrics.json`` of a run, one dict per line; a line cut short is left out.

    So is any other line that is no dict in UTF-8: what a full disk or a crash leaves.
    """
    records = []
    for line in Path(path).read_bytes().splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):  # the run was stopped while writing it
            continue
        if isinstance(record, dict):
            records.append(record)
    return records


def has_step(record: Mapping[str, Any]) -> bool:
    """Whether a record tells its step; one that does not has no place on an axis."""
    iteration = record.get("iteration")
    return isinstance(iteration, int | float) and math.isfinite(iteration)


def select_series(
    records: Sequence[Mapping[str, Any]], keys: Sequence[str]
) -> tuple[list[float], dict[str, list[float]]]:
    """Returns the iterations at which all ``keys`` were recorded, and their values there."""
    chosen = [record for record in records if has_step(record) and set(keys) <= set(record)]
    values = {key: [float(record[key]) for record in chosen] for key in keys}
    return [float(record["iteration"]) for record in chosen], values


def start_figure(theme: Theme, *, height: float, width: float = 6.4) -> tuple[Figure, Axes]:
    """Returns a figure of one chart, of that many inches, and its axes."""
    # A Figure of its own, not pyplot: no global state, and no window system is looked for.
    figure = Figure(figsize=(width, height))
    figure.set_layout_engine("constrained", w_pad=0.16, h_pad=0.16)
    axes = figure.add_subplot()
    style_axes(axes, theme)
    return figure, axes


def style_axes(axes: Axes, theme: Theme) -> None:
    """Gives axes the look of all charts: quiet ticks, one spine."""
    axes.set_facecolor("none")
    axes.set_axisbelow(True)
    axes.tick_params(colors=_QUIET[theme], length=0, labelsize=9)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(LINE[theme])
    axes.xaxis.label.set_color(_QUIET[theme])
    axes.yaxis.label.set_color(_QUIET[theme])
    axes.title.set_color(INK[theme])


def list_colors(theme: Theme) -> list[str]:
    """Colours of lines, in the order in which they are used.

    Any two can be told apart also without red, green or blue cones (a distance of 18 and more in
    CIE Lab), and each from the page (contrast 3 and more).
    """
    return [_ACCENT[theme], *_OTHERS[theme]]


def list_styles(theme: Theme, number: int) -> list[dict[str, Any]]:
    """Returns colour, dash and marker of so many lines, no two of them alike for 24 lines.

    Markers differ too, for prints without colour.
    """
    colors, dashes = list_colors(theme), ("-", "--", ":", "-.")
    return [
        {
            "color": colors[index % len(colors)],
            "linestyle": dashes[index // len(colors) % len(dashes)],
            "marker": _MARKERS[index % len(_MARKERS)],
        }
        for index in range(number)
    ]


def darken(svg: bytes) -> bytes:
    """Returns a light chart as it would be drawn for a dark page, in no time."""
    pairs = [(shades["light"], shades["dark"]) for shades in (INK, _QUIET, LINE, _PAGE, _ACCENT)]
    pairs += zip(_OTHERS["light"], _OTHERS["dark"], strict=True)
    dark_of = {light.encode(): dark.encode() for light, dark in pairs}
    anyone = re.compile(b"|".join(map(re.escape, dark_of)))
    return anyone.sub(lambda match: dark_of[match[0]], svg)


def to_text(name: str, *, longest: int = _LONGEST_NAME) -> str:
    """Returns a person's name of a run or class, fit to be drawn by matplotlib.

    It reads what stands between dollar signs as a formula, and leaves out of a legend what begins
    with an underscore. Long names lose their middle: runs often differ at the end.
    """
    text = " ".join(name.encode(errors="backslashreplace").decode().split())
    if len(text) > longest:
        end = (longest - 1) // 2
        text = f"{text[: longest - 1 - end]}…{text[-end:]}"
    text = _escape_formulas(text)
    return f" {text}" if text.startswith("_") else text


def to_texts(names: Iterable[str], *, longest: int = _LONGEST_NAME) -> list[str]:
    """Returns names as ``to_text`` does, longer where two would else be drawn alike."""
    names = list(names)
    whole = [to_text(name, longest=sys.maxsize) for name in names]
    for length in range(longest, max(map(len, whole), default=0), _LETTERS_MORE):
        texts = [to_text(name, longest=length) for name in names]
        if len(set(texts)) == len(set(whole)):
            return texts
    return whole


def add_legend(figure: Figure, axes: Axes, theme: Theme) -> None:
    """Names the lines or bars of axes below all of them, where there are several.

    The figure grows by the legend's height, so that the axes keep theirs.
    """
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) < 2:
        return
    width, height = figure.get_size_inches()
    entry = _LEGEND_MARK + _LEGEND_LETTER * max(map(len, labels))
    columns = int(min(_MOST_COLUMNS, len(labels), max(1, width // entry)))
    figure.set_size_inches(width, height + _LEGEND_LINE * -(-len(labels) // columns))
    figure.legend(handles, labels, loc="outside lower center", frameon=False, fontsize=8,
                  labelcolor=INK[theme], ncols=columns)  # fmt: skip


def encode(figure: Figure, theme: Theme, format: Format) -> bytes:
    """Returns the file of a figure, on the page colour of its theme.

    ``$`` is drawn as it is, and a label that is longer than the axis of values has several lines.
    The same figure is the same bytes each time.
    """
    for axes in figure.axes:
        letters = max(20, int(_LETTERS_AN_INCH * figure.get_figheight()))
        axes.yaxis.label.set_text(textwrap.fill(axes.get_ylabel(), letters))
    ticks = {
        id(label)
        for axes in figure.axes
        for axis in (axes.xaxis, axes.yaxis)
        for label in (*axis.get_ticklabels(which="both"), axis.get_offset_text())
    }
    for text in figure.findobj(Text):  # powers of ten at ticks are formulas, and nothing else is
        if isinstance(text, Text) and id(text) not in ticks:
            text.set_text(_escape_formulas(text.get_text()))
    buffer = io.BytesIO()
    undated = {"Date": None} if format == "svg" else None
    constant_ids = matplotlib.rc_context({"svg.hashsalt": "qbheat_det"})  # else ids are random
    with constant_ids, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        figure.savefig(buffer, format=format, facecolor=_PAGE[theme], dpi=160, metadata=undated)
    for warning in said:
        if re.match(_NO_GLYPH, str(warning.message)):
            _say_once("letters that the font of charts does not have are drawn as boxes")
        elif not re.match(_NO_ROOM, str(warning.message)):
            warnings.warn(warning.message, category=warning.category, stacklevel=2)
    return buffer.getvalue()


def _escape_formulas(text: str) -> str:
    return re.sub(r"(?<!\\)\$", r"\\$", text)


@functools.cache
def _say_once(sentence: str) -> None:
    logger.warning(sentence)
