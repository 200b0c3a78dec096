# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Charts of detection metrics, several runs in each: AP by size and class, precision-recall."""

import textwrap
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as MplFigure

from .detection_scores import CURVE_IOUS, SIZES, Array, DetectionScores, average_over_classes
from .plotting import add_legend, list_styles, start_chart, start_figure, themed, to_text, to_texts

Scores = Mapping[str, DetectionScores]
"""By the labels of the runs; all of the same ground truth."""

MOST_BARS = 40
"""Classes in a bar chart; of more classes, the best and the worst are drawn, half each."""
MOST_CURVES = 24
"""Classes with axes of their own: those with the most boxes."""
_THICKNESS = 0.8  # of all bars of one group
_HATCHES = (None, "///", "...")  # of the second and third round of colors
_PANEL_LETTERS = 28  # in a line of a title


@themed
def plot_ap_by_size(scores: Scores) -> MplFigure:
    """Draws AP, AP50, AP75 and the APs of small, medium and large boxes, a bar for each run."""
    figure, axes = start_chart(height=3.4)
    keys = list(next(iter(scores.values())).summary)
    _draw_bars(axes, {name: np.array([score.summary[key] for key in keys])
                      for name, score in scores.items()})  # fmt: skip
    axes.set_xticks(range(len(keys)), [SIZES.get(key, key) for key in keys])
    axes.set_ylabel("AP (%)")
    axes.set_ylim(0, max(1.0, 1.12 * axes.dataLim.y1))
    axes.set_title("Average precision: over IoU, at one IoU, and by size of the boxes")
    add_legend(figure, axes)
    return figure


@themed
def plot_ap_by_class(scores: Scores, class_names: Sequence[str]) -> MplFigure:
    """Draws the AP of each class, the best on top, a bar for each run; (K,) names.

    Classes without boxes come last.
    """
    order = rank_classes(scores)
    num_boxes = next(iter(scores.values())).num_boxes
    figure, axes = start_chart(height=1.3 + len(order) * max(0.3, 0.15 * len(scores)))
    _draw_bars(axes, {name: score.class_ap[order] for name, score in scores.items()}, "horizontal")
    axes.set_yticks(range(len(order)), _name_classes(class_names, num_boxes, order))
    axes.set_ylim(len(order) - 0.4, -0.6)
    axes.set_xlabel("AP (%), IoU 0.50 to 0.95")
    axes.set_xlim(0, max(1.0, 1.1 * axes.dataLim.x1))
    axes.set_title("Average precision of each class (number of boxes)")
    add_legend(figure, axes)
    return figure


def rank_classes(scores: Scores) -> list[int]:
    """Returns the classes of ``plot_ap_by_class``, the best mean AP over runs first."""
    values = np.stack([score.class_ap for score in scores.values()])
    known = ~np.isnan(values)
    mean = np.where(known.any(0), np.nansum(values, 0) / known.sum(0).clip(min=1), -np.inf)
    order = [int(k) for k in np.argsort(-mean, kind="stable")]
    with_boxes = [k for k in order if np.isfinite(mean[k])]
    if len(order) <= MOST_BARS:
        return order
    if len(with_boxes) <= MOST_BARS:
        return with_boxes
    return with_boxes[: MOST_BARS // 2] + with_boxes[-(MOST_BARS // 2) :]


@themed
def plot_precision_recall(scores: Scores) -> MplFigure:
    """Draws precision over recall, the mean of all classes, at IoU 0.50 and at 0.75.

    The area under a curve is AP50 or AP75.
    """
    panels = {
        f"IoU {iou:.2f}, mean of classes": {
            name: average_over_classes(score.precision[t]) for name, score in scores.items()
        }
        for t, iou in enumerate(CURVE_IOUS)
    }
    return _plot_curves(panels, next(iter(scores.values())).recall, columns=2, height=3.4)


@themed
def plot_class_precision_recall(scores: Scores, class_names: Sequence[str]) -> MplFigure:
    """Draws precision over recall of each class with boxes at IoU 0.50; (K,) names."""
    first = next(iter(scores.values()))
    order = [int(k) for k in np.argsort(-first.num_boxes, kind="stable") if first.num_boxes[k]]
    order = order[:MOST_CURVES]
    titles = _name_classes(class_names, first.num_boxes, order)
    panels = {
        textwrap.fill(title, _PANEL_LETTERS): {
            name: score.precision[0, :, k] for name, score in scores.items()
        }
        for title, k in zip(titles, order, strict=True)
    }
    return _plot_curves(panels, first.recall, columns=3, height=1.75)


def _plot_curves(
    panels: Mapping[str, Mapping[str, Array]], recall: Array, *, columns: int, height: float
) -> MplFigure:
    """Draws a panel for each title, all over one range, which ends where the longest curve does."""
    rows = -(-len(panels) // columns)
    figure = start_figure(height=rows * height + 0.4, width=6.4)
    axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).ravel()
    end = top = 0.05
    for one, (title, curves) in zip(axes, panels.items(), strict=False):
        styles = list_styles(len(curves))
        for (name, precision), style in zip(curves.items(), styles, strict=True):
            one.plot(recall, precision, label=to_text(name), **style | {"marker": ""})
            if np.nan_to_num(precision).any():
                end = max(end, float(recall[np.flatnonzero(np.nan_to_num(precision))[-1]]))
                top = max(top, float(np.nanmax(precision)))
        one.set_title(title, fontsize=8)
        one.set_xlabel("recall")
        one.set_ylabel("precision")
        one.label_outer()
    axes[0].set_xlim(0, min(1.0, 1.08 * end))
    axes[0].set_ylim(0, min(1.03, 1.08 * top))
    for one in axes[len(panels) :]:
        one.set_axis_off()
    add_legend(figure, axes[0])
    return figure


def _draw_bars(axes: Axes, values: Mapping[str, Array], direction: str = "vertical") -> None:
    """Draws groups of bars, one of each run, with their numbers; nan has no bar."""
    width = _THICKNESS / len(values)
    for index, (name, own) in enumerate(values.items()):
        positions = np.arange(len(own)) - _THICKNESS / 2 + (index + 0.5) * width
        style = {
            "color": list_styles(index + 1)[index]["color"],
            "hatch": _HATCHES[index // 6 % 3],
            "label": to_text(name),
        }
        draw = axes.bar if direction == "vertical" else axes.barh
        bars = draw(positions, np.nan_to_num(own), 0.92 * width, edgecolor="none", **style)
        if direction == "horizontal" or len(values) <= 3:
            texts = ["-" if np.isnan(value) else f"{value:.1f}" for value in own]
            axes.bar_label(bars, texts, fontsize=7, padding=2)


def _name_classes(
    class_names: Sequence[str], num_boxes: Iterable[int], order: Sequence[int]
) -> list[str]:
    """Returns the names of classes with their numbers of boxes."""
    names, numbers = to_texts([class_names[k] for k in order], longest=24), list(num_boxes)
    return [f"{name} ({numbers[k]:,})" for name, k in zip(names, order, strict=True)]
