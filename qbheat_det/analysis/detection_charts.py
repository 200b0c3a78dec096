# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Charts of detections, several runs in each: AP by size and by class, precision over recall."""

import textwrap
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .charts import (
    INK,
    LINE,
    Format,
    Theme,
    add_legend,
    encode,
    list_colors,
    list_styles,
    start_figure,
    style_axes,
    to_texts,
)
from .detection_scores import DRAWN_IOUS, SIZES, DetectionScores, average_over_classes

Array = npt.NDArray[np.float64]
Scores = Mapping[str, DetectionScores]

MOST_BARS = 40
"""Classes that a chart of bars has room for: of more, half the best and half the worst."""
MOST_PANELS = 24
"""Classes that get axes of their own: those with the most boxes."""
_PANEL_COLUMNS, _PANEL_HEIGHT = 3, 1.75  # inches
_PANEL_LETTERS = 28  # of a line above a panel
_THICKNESS = 0.8  # of all bars of one group
_NUMBERED = 3  # runs whose bars have room for a number
_LONGEST = 24  # letters of a name, unless two would be alike
_SHORTEST_AXIS = 1.0  # of AP, in per cent


def plot_ap_of_sizes(scores: Scores, *, theme: Theme = "light", format: Format = "svg") -> bytes:
    """Draws AP, AP50, AP75 and the APs of small, medium and large boxes, a bar for each run.

    Args:
        scores: of the same ground truth, by the runs' names.
        theme: of the page.
        format: of the file.
    """
    first = next(iter(scores.values()))
    figure, axes = start_figure(theme, height=3.4)
    keys = list(first.summary)
    width = _THICKNESS / len(scores)
    for index, (name, score) in enumerate(_name_runs(scores)):
        values = np.array([score.summary[key] for key in keys])
        places = np.arange(len(keys)) - _THICKNESS / 2 + (index + 0.5) * width
        color, hatch = _look(index, theme)
        bars = axes.bar(places, np.nan_to_num(values), width=0.92 * width, label=name,
                        color=color, hatch=hatch, edgecolor="none")  # fmt: skip
        if len(scores) <= _NUMBERED:
            text = ["-" if np.isnan(value) else f"{value:.1f}" for value in values]
            axes.bar_label(bars, text, fontsize=7.5, color=INK[theme], padding=1)
    axes.set_xticks(range(len(keys)), [_name_size(key, first) for key in keys])
    axes.tick_params(axis="x", labelcolor=INK[theme])
    axes.set_ylabel("AP (%)")
    axes.grid(axis="y", color=LINE[theme])
    axes.set_ylim(0, _find_end(axes.dataLim.y1, room=1.12))
    add_legend(figure, axes, theme)
    axes.set_title("Average precision, over IoU, at one IoU, and by size of the boxes", fontsize=10)
    return encode(figure, theme, format)


def plot_ap_of_classes(
    scores: Scores, class_names: Sequence[str], *, theme: Theme = "light", format: Format = "svg"
) -> bytes:
    """Draws the AP of each class, a bar for each run; the class with the best mean on top.

    Names have the number of boxes behind them. Classes without boxes have no bar and are last. Of
    more than ``MOST_BARS`` classes the best and the worst are drawn, half each.

    Args:
        scores: of the same ground truth, by the runs' names.
        class_names: (K,).
        theme: of the page.
        format: of the file.
    """
    order = choose_classes(scores)
    num_boxes = next(iter(scores.values())).num_boxes
    figure, axes = start_figure(theme, height=1.3 + len(order) * max(0.3, 0.15 * len(scores)))
    width = _THICKNESS / len(scores)
    for index, (name, score) in enumerate(_name_runs(scores)):
        values = score.class_ap[order]
        places = np.arange(len(order)) - _THICKNESS / 2 + (index + 0.5) * width
        color, hatch = _look(index, theme)
        bars = axes.barh(places, np.nan_to_num(values), height=0.92 * width, label=name,
                         color=color, hatch=hatch, edgecolor="none")  # fmt: skip
        text = ["no boxes" if np.isnan(value) else f"{value:.1f}" for value in values]
        axes.bar_label(bars, text, fontsize=7, color=INK[theme], padding=2)
    axes.set_yticks(range(len(order)), _name_classes(class_names, num_boxes, order))
    axes.tick_params(axis="y", labelcolor=INK[theme])
    axes.set_ylim(len(order) - 0.4, -0.6)
    axes.set_xlabel("AP (%), IoU 0.50 to 0.95")
    axes.grid(axis="x", color=LINE[theme])
    axes.set_xlim(0, _find_end(axes.dataLim.x1, room=1.1))
    add_legend(figure, axes, theme)
    axes.set_title("Average precision of each class (number of boxes)", fontsize=10)
    return encode(figure, theme, format)


def choose_classes(scores: Scores) -> list[int]:
    """Returns the classes that ``plot_ap_of_classes`` draws, in its order."""
    values = np.stack([score.class_ap for score in scores.values()])
    known = ~np.isnan(values)
    mean = np.where(known.any(0), np.nansum(values, 0) / known.sum(0).clip(min=1), -np.inf)
    order = [int(k) for k in np.argsort(-mean, kind="stable")]
    if len(order) <= MOST_BARS:
        return order
    have_boxes = [k for k in order if np.isfinite(mean[k])]
    if len(have_boxes) <= MOST_BARS:
        return have_boxes
    return have_boxes[: MOST_BARS // 2] + have_boxes[-(MOST_BARS // 2) :]


def plot_precision_recall(
    scores: Scores, *, theme: Theme = "light", format: Format = "svg"
) -> bytes:
    """Draws precision over recall, the mean of all classes with boxes, at IoU 0.50 and at 0.75.

    The area under a curve is AP50, or AP75. Both have the same axes, which end where the longest
    curve does.

    Args:
        scores: of the same ground truth, by the runs' names.
        theme: of the page.
        format: of the file.
    """
    figure = _start_panels(height=3.6)
    panels = figure.subplots(1, len(DRAWN_IOUS), squeeze=False)[0]
    for t, (axes, iou) in enumerate(zip(panels, DRAWN_IOUS, strict=True)):
        style_axes(axes, theme)
        for index, (name, score) in enumerate(_name_runs(scores)):
            mean = average_over_classes(score.precision[t])
            _draw_curve(axes, score.recall, mean, index, name, theme)
        _finish_curves(axes, f"IoU {iou:.2f}, mean of classes", theme)
    _fit_curves(panels)
    panels[0].set_ylabel("precision")
    add_legend(figure, panels[0], theme)
    return encode(figure, theme, format)


def plot_class_precision_recall(
    scores: Scores, class_names: Sequence[str], *, theme: Theme = "light", format: Format = "svg"
) -> bytes:
    """Draws precision over recall at IoU 0.50, axes for each class: those with boxes, most first.

    All axes have one range, which ends where the longest curve does.

    Args:
        scores: of the same ground truth, by the runs' names.
        class_names: (K,).
        theme: of the page.
        format: of the file.

    Raises:
        ValueError: no class has boxes.
    """
    num_boxes = next(iter(scores.values())).num_boxes
    order = [int(k) for k in np.argsort(-num_boxes, kind="stable") if num_boxes[k]][:MOST_PANELS]
    if not order:
        raise ValueError("there is no class with boxes")
    rows = -(-len(order) // _PANEL_COLUMNS)
    figure = _start_panels(height=rows * _PANEL_HEIGHT + 0.5)
    panels = figure.subplots(rows, _PANEL_COLUMNS, squeeze=False)
    titles = _name_classes(class_names, num_boxes, order)
    for place, axes in enumerate(panels.flat):
        if place >= len(order):
            axes.set_axis_off()
            continue
        k = order[place]
        style_axes(axes, theme)
        for index, (name, score) in enumerate(_name_runs(scores)):
            _draw_curve(axes, score.recall, score.precision[0, :, k], index, name, theme)
        _finish_curves(axes, textwrap.fill(titles[place], _PANEL_LETTERS), theme)
        axes.tick_params(labelsize=7)
    _fit_curves(panels.flat[: len(order)])
    for axes in panels[:, 0]:
        axes.set_ylabel("precision")
    add_legend(figure, panels[0, 0], theme)
    return encode(figure, theme, format)


def _start_panels(*, height: float) -> Figure:
    figure = Figure(figsize=(6.4, height))
    figure.set_layout_engine("constrained", w_pad=0.06, h_pad=0.06)
    return figure


def _draw_curve(
    axes: Axes, recall: Array, precision: Array, index: int, name: str, theme: Theme
) -> None:
    look = list_styles(theme, index + 1)[index]
    color, style = look["color"], look["linestyle"]  # a marker at each recall would hide the line
    axes.plot(recall, precision, label=name, color=color, lw=1.5, ls=style)


def _finish_curves(axes: Axes, title: str, theme: Theme) -> None:
    axes.set_title(title, fontsize=8)
    axes.set_xlabel("recall")
    axes.grid(color=LINE[theme])
    if not any(np.nan_to_num(np.asarray(line.get_ydata())).any() for line in axes.get_lines()):
        axes.text(0.5, 0.5, "no detection is right", transform=axes.transAxes, ha="center",
                  va="center", fontsize=8, color=INK[theme])  # fmt: skip


def _fit_curves(panels: Iterable[Axes]) -> None:
    """Gives all panels one range, so that curves of two panels can be compared."""
    drawn = list(panels)
    ends, tops = [], []
    for line in (line for axes in drawn for line in axes.get_lines()):
        recall = np.asarray(line.get_xdata(), dtype=np.float64)
        precision = np.nan_to_num(np.asarray(line.get_ydata(), dtype=np.float64))
        ends.append(float(recall[np.flatnonzero(precision)[-1]]) if precision.any() else 0.0)
        tops.append(float(precision.max()))
    for axes in drawn:
        axes.set_xlim(0, min(1.0, max(0.05, 1.08 * max(ends))))
        axes.set_ylim(0, min(1.03, max(0.05, 1.08 * max(tops))))


def _look(index: int, theme: Theme) -> tuple[str, str | None]:
    """Colour and hatch of the bars of a run: those of a second round of colours are hatched."""
    colors = list_colors(theme)
    return colors[index % len(colors)], (None, "///", "...")[index // len(colors) % 3]


def _find_end(highest: float, *, room: float) -> float:
    """Where an axis of AP ends that begins at 0, which has a length also if all bars have none."""
    return max(_SHORTEST_AXIS, room * highest)


def _name_runs(scores: Scores) -> Iterable[tuple[str, DetectionScores]]:
    return zip(to_texts(scores, longest=_LONGEST), scores.values(), strict=True)


def _name_classes(
    class_names: Sequence[str], num_boxes: npt.NDArray[np.int64], order: Sequence[int]
) -> list[str]:
    """Names of the drawn classes, apart from one another, with the number of boxes behind each."""
    names = to_texts([class_names[k] for k in order], longest=_LONGEST)
    return [f"{name} ({num_boxes[k]:,})" for name, k in zip(names, order, strict=True)]


def _name_size(key: str, scores: DetectionScores) -> str:
    if key not in SIZES:
        return key
    return f"{SIZES[key]}\n{scores.num_of_size[key]:,} boxes"
