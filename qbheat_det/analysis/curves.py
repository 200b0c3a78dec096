# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The figure "curves": training curves from ``metrics.json``, by epochs."""

import itertools
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure as Chart

from qbheat_det.core.errors import UserError

from . import plotting
from .figures import Figure, NotApplicable, Table
from .run import FigureOptions, Run, run_each

Curve = tuple[list[float], list[float]]
"""Ascending positions on the x axis, and the value at each. A nan value is a gap in the line."""
_QUANTITIES = {  # from a pattern of keys to (chart title, axis label)
    r"^total_loss$": ("Total loss", "loss"),
    r"loss(?!.*_\d+$)": ("Loss: {}", "loss"),  # excludes earlier decoder blocks (_0, _1, …)
    r"/AP(50|75)?$": ("{} on the test set", "{} (%)"),
    r"accuracy$|/top[15]$": ("Accuracy: {}", "accuracy (%)"),
    r"^correlation/mean$": ("Spatial correlation of the map", "mean |correlation|"),
    r"^lr$": ("Learning rate", "learning rate"),
    r"^gradient_norm$": ("Norm of the gradients", "norm"),
}
_MAX_MARKERS = 24  # curves with more points have no markers
_LOG_SCALE_RATIO = 100.0  # y is logarithmic if largest / smallest value is above this
_EXPLANATION = (
    "Losses are comparable only between runs of one model, so each model has its own charts. "
    "Training losses are medians over the last steps.",
)


@dataclass(frozen=True)
class Panel:
    """One chart of the figure, with a curve per run."""

    title: str
    y_label: str
    curves: Mapping[str, Curve]  # by label of the run


def draw_curves(runs: Sequence[Run], options: FigureOptions) -> Figure:
    """Draws a panel per logged quantity, with a line per run. Losses have a panel per model."""

    def check(run: Run) -> Run:
        """Returns the run, or raises ``NotApplicable`` if it has no curves."""
        epochs, _ = read_series(run.metrics, "epoch")
        if not epochs:
            raise NotApplicable(f"'{run.label}' has no metrics.json with epochs")
        return run

    results = run_each(runs, check, nothing="no curves")
    logged = list(results.by_label.values())
    records = list(itertools.chain.from_iterable(run.metrics for run in logged))
    quantities = find_quantities(records)
    by_model = _group_by_model(logged)
    panels: list[Panel] = []
    data: dict[str, dict[str, Any]] = {run.label: {} for run in logged}
    for key, (title, y_label) in quantities.items():
        groups = by_model if y_label == "loss" else {"": logged}
        for suffix, group in groups.items():
            curves = {}
            for run in group:
                epochs, values = select_curve(run, key)
                if epochs:
                    curves[run.label] = (epochs, values)
                    data[run.label][key] = {"epochs": epochs, "values": values}
            # A quantity with single values has no line. It is only in the table.
            has_line = any(len(epochs) > 1 for epochs, _ in curves.values())
            if has_line:
                panels.append(Panel(title + suffix, y_label, curves))
    images = {}
    labels = [run.label for run in logged]
    for number, panel in enumerate(panels, start=1):
        chart = plot_panel(panel, labels)
        images[str(number)] = plotting.chart_image(chart, caption=panel.title)
    table = _tabulate_last_values(logged, quantities)
    return results.draw("curves", "Training curves", _EXPLANATION, images, table, runs=data)


def _group_by_model(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Groups runs by the name of their model. The keys are suffixes of chart titles.

    They are ", MODEL", or "" if all runs have the same model. Runs whose config cannot be read are
    in the group ", None".
    """
    groups: dict[str | None, list[Run]] = {}
    for run in runs:
        try:
            model = str(run.cfg.MODEL.META_ARCHITECTURE)
        except UserError:
            model = None
        groups.setdefault(model, []).append(run)
    if len(groups) == 1:
        return {"": list(runs)}
    return {f", {model}": group for model, group in groups.items()}


def _tabulate_last_values(runs: Sequence[Run], quantities: Mapping[str, tuple[str, str]]) -> Table:
    """Returns a table of the last total loss, and the last values of all quantities in percent."""
    keys = ["epoch"]
    for key, (_, y_label) in quantities.items():
        if y_label.endswith("(%)") or key == "total_loss":
            keys.append(key)
    rows = []
    for run in runs:
        cells = []
        for key in keys:
            _, values = read_series(run.metrics, key)
            finite = [value for value in values if math.isfinite(value)]
            if not finite:
                cells.append("n/a")
            elif finite[-1] >= 1000:
                cells.append(f"{finite[-1]:,.0f}")
            else:
                cells.append(f"{finite[-1]:.4g}")
        rows.append((run.label, *cells))
    names = [_name_metric(key, quantities) for key in keys[1:]]
    return Table(("Run", "epochs", *names), rows)


@plotting.themed
def plot_panel(panel: Panel, names: Sequence[str]) -> Chart:
    """Draws a panel with one line per run.

    ``names`` are the labels of all runs, so that a run has the same style in each panel.
    """
    figure, axes = plotting.start_chart(height=3.2)
    styles = dict(zip(names, plotting.list_styles(len(names)), strict=True))
    finite = []  # the finite values of all runs
    for name, (epochs, values) in panel.curves.items():
        style = styles[name] | {"label": plotting.to_text(name)}
        if len(epochs) > _MAX_MARKERS:
            style["marker"] = ""
        axes.plot(epochs, values, **style)
        finite += [value for value in values if math.isfinite(value)]
    if finite and min(finite) > 0 and max(finite) > _LOG_SCALE_RATIO * min(finite):
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=min(0, *finite))
    axes.set_xlim(left=0)
    axes.set_xlabel("epochs")
    axes.set_ylabel(panel.y_label)
    plotting.add_legend(figure, axes)
    return figure


def read_series(records: Sequence[Mapping[str, Any]], key: str) -> Curve:
    """Returns the ascending iterations and the values of a logged key.

    If a resumed run repeats an iteration, the last record is used. Infinite values are replaced by
    nan. If no value is finite, both lists are empty.
    """
    points: dict[float, float] = {}  # values by iteration
    for record in records:
        value = record.get(key)
        if isinstance(value, int | float):
            points[float(record["iteration"])] = float(value)
    if not any(math.isfinite(value) for value in points.values()):
        return [], []
    iterations = sorted(points)
    values = []
    for iteration in iterations:
        value = points[iteration]
        if not math.isfinite(value):
            value = math.nan
        values.append(value)
    return iterations, values


def find_quantities(records: Sequence[Mapping[str, Any]]) -> dict[str, tuple[str, str]]:
    """Maps each logged key to draw, such as a loss or AP, to (chart title, axis label).

    The order is that of ``_QUANTITIES``, and that of the records for keys of the same pattern.
    """
    keys = dict.fromkeys(itertools.chain.from_iterable(records))  # each key once, in this order
    quantities: dict[str, tuple[str, str]] = {}
    for pattern, (title, y_label) in _QUANTITIES.items():
        for key in keys:
            if key in quantities or not re.search(pattern, key):
                continue
            _, values = read_series(records, key)
            if values:
                name = _name_metric(key, keys)
                quantities[key] = (title.format(name), y_label.format(key.rpartition("/")[2]))
    return quantities


def _name_metric(key: str, keys: Collection[str]) -> str:
    """Returns the name of a logged key in chart titles: the key itself, except for AP of boxes.

    If a run logs the metrics of a student, those without "student/" are of its mean teacher.
    """
    owner, _, name = key.rpartition("bbox/")
    if not name.startswith("AP") or owner not in ("", "student/"):
        return key
    if owner:
        return f"{name} of the student"
    if f"student/{key}" in keys:
        return f"{name} of the mean teacher"
    return name


def select_curve(run: Run, key: str) -> Curve:
    """Returns the epochs and values of a logged key, without records whose epoch is unknown."""
    iterations, logged_epochs = read_series(run.metrics, "epoch")
    epoch_of = dict(zip(iterations, logged_epochs, strict=True))  # by iteration
    epochs = []
    values = []
    iterations, logged_values = read_series(run.metrics, key)
    for iteration, value in zip(iterations, logged_values, strict=True):
        if iteration in epoch_of:
            epochs.append(epoch_of[iteration])
            values.append(value)
    return epochs, values
