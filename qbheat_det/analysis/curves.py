# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The figure "curves": training curves from ``metrics.json``, by epochs."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure as Chart

from qbheat_det.core.errors import UserError

from . import plotting
from .figures import Figure, NotApplicable, Table
from .run import FigureOptions, Run, run_each

Curve = tuple[list[float], list[float]]
"""Ascending positions on the x axis, and values. A nan value is a gap."""
_QUANTITIES = {  # pattern of keys: chart title, axis label
    r"^total_loss$": ("Total loss", "loss"),
    r"loss(?!.*_\d+$)": ("Loss: {}", "loss"),  # excludes earlier decoder blocks (_0, _1, …)
    r"/AP(50|75)?$": ("{} on the test set", "{} (%)"),
    r"accuracy$|/top[15]$": ("Accuracy: {}", "accuracy (%)"),
    r"^correlation/mean$": ("Spatial correlation of the map", "mean |correlation|"),
    r"^lr$": ("Learning rate", "learning rate"),
    r"^gradient_norm$": ("Norm of the gradients", "norm"),
}
_FEW_POINTS = 25  # curves with fewer points have markers
_LOG_SCALE_FROM = 100.0  # ratio of the largest to the smallest value above which y is logarithmic
_EXPLANATION = (
    "Losses are comparable only between runs of one model, so each model has its own charts. "
    "Training losses are medians over the last steps.",
)


def draw_curves(runs: Sequence[Run], options: FigureOptions) -> Figure:
    """Draws a panel per logged quantity, with a line per run. Losses have a panel per model."""

    def check(run: Run) -> Run:
        if not read_series(run.metrics, "epoch")[0]:
            raise NotApplicable(f"'{run.label}' has no metrics.json with epochs")
        return run

    results = run_each(runs, check, nothing="no curves")
    logged = list(results.found.values())
    panels: dict[str, tuple[str, dict[str, Curve]]] = {}
    data: dict[str, dict[str, Any]] = {run.label: {} for run in logged}
    quantities = find_quantities([record for run in logged for record in run.metrics])
    by_model: dict[str | None, list[Run]] = {}
    for run in logged:
        by_model.setdefault(_find_model(run), []).append(run)
    for key, (title, label) in quantities.items():
        groups = {"": logged}
        if label == "loss" and len(by_model) > 1:
            groups = {f", {model}": own for model, own in by_model.items()}
        for suffix, group in groups.items():
            curves = {run.label: select_curve(run, key) for run in group}
            curves = {name: curve for name, curve in curves.items() if curve[0]}
            for name, (positions, values) in curves.items():
                data[name][key] = {"epochs": positions, "values": values}
            # Single values are only in the table.
            if any(len(positions) > 1 for positions, _ in curves.values()):
                panels[title + suffix] = label, curves
    images = {}
    if panels:
        chart = plot_curves(panels, [run.label for run in logged])
        images["all"] = plotting.chart_image(chart, caption=f"{', '.join(panels)}.")
    keys = [key for key, (_, label) in quantities.items()
            if label.endswith("(%)") or key == "total_loss"]  # fmt: skip
    rows = []
    for run in logged:
        last = [_last(read_series(run.metrics, key)[1]) for key in ("epoch", *keys)]
        rows.append((run.label, *map(_format, last)))
    table = Table(("Run", "epochs", *keys), rows)
    return results.draw("curves", "Training curves", _EXPLANATION, images, table, runs=data)


@plotting.themed
def plot_curves(
    panels: Mapping[str, tuple[str, Mapping[str, Curve]]], names: Sequence[str]
) -> Chart:
    """Draws panels with one line per run.

    Args:
        panels: maps the title of each panel to a tuple: its y label, and its curves by run.
        names: the names of all runs.
    """
    columns, rows = min(2, len(panels)), math.ceil(len(panels) / 2)
    figure = plotting.start_figure(height=3 * rows, width=5.2 * columns)
    styles = dict(zip(names, plotting.list_styles(len(names)), strict=True))
    for index, (title, (label, curves)) in enumerate(panels.items(), start=1):
        axes = figure.add_subplot(rows, columns, index)
        for name, (positions, values) in curves.items():
            marker = styles[name]["marker"] if len(positions) < _FEW_POINTS else ""
            style = styles[name] | {"marker": marker, "label": plotting.to_text(name)}
            axes.plot(positions, values, **style)
        finite = [v for _, values in curves.values() for v in values if math.isfinite(v)]
        if finite and min(finite) > 0 and max(finite) > _LOG_SCALE_FROM * min(finite):
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=min(0, *finite))
        axes.set_xlim(left=0)
        axes.set_title(title)
        axes.set_xlabel("epochs")
        axes.set_ylabel(label)
    plotting.add_legend(figure, *figure.axes)
    return figure


def read_series(records: Sequence[Mapping[str, Any]], key: str) -> Curve:
    """Returns the ascending iterations and the values of a logged key.

    If a resumed run repeats an iteration, its last record is used. Infinite values are replaced by
    nan. If no value is finite, both lists are empty.
    """
    points = {
        float(record["iteration"]): float(record[key])
        for record in records
        if isinstance(record.get(key), int | float)
    }
    if not any(map(math.isfinite, points.values())):
        return [], []
    iterations = sorted(points)
    values = [points[iteration] for iteration in iterations]
    return iterations, [value if math.isfinite(value) else math.nan for value in values]


def find_quantities(records: Sequence[Mapping[str, Any]]) -> dict[str, tuple[str, str]]:
    """Returns (chart title, axis label) of the logged keys to draw, such as losses and AP."""
    keys = dict.fromkeys(key for record in records for key in record)
    found: dict[str, tuple[str, str]] = {}
    for pattern, (title, label) in _QUANTITIES.items():
        for key in keys:
            if key not in found and re.search(pattern, key) and read_series(records, key)[0]:
                found[key] = title.format(key), label.format(key.rpartition("/")[2])
    return found


def select_curve(run: Run, key: str) -> Curve:
    """Returns epochs and values of a logged key. If the epochs are unknown, both are empty."""
    epochs = dict(zip(*read_series(run.metrics, "epoch"), strict=True))
    known = [(epochs[i], value) for i, value in zip(*read_series(run.metrics, key), strict=True)
             if i in epochs]  # fmt: skip
    return [epoch for epoch, _ in known], [value for _, value in known]


def _format(value: float) -> str:
    if math.isnan(value):
        return "n/a"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _last(values: Sequence[float]) -> float:
    return next((value for value in reversed(values) if math.isfinite(value)), math.nan)


def _find_model(run: Run) -> str | None:
    """Returns the name of a run's model, or None if its config cannot be read."""
    try:
        return str(run.cfg.MODEL.META_ARCHITECTURE)
    except UserError:
        return None
