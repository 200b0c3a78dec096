# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Training curves of several runs, from their ``metrics.json``, over epochs, images or steps."""

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from matplotlib.axes import Axes

from qbheat_det.core.figures import Figure, Image, NotApplicable, Table, register_figure
from qbheat_det.core.files import write_atomically

from .figure import FigureOptions
from .plotting import (
    add_legend,
    chart_image,
    list_styles,
    start_chart,
    start_figure,
    themed,
    to_text,
)
from .run import Run, read_metrics

Curve = tuple[list[float], list[float]]
"""Positions on an axis, rising, and values; nan is a gap."""
Axis = Literal["epochs", "images", "steps"]
AXES: dict[Axis, str] = {"epochs": "epochs", "images": "images seen", "steps": "steps"}
_QUANTITIES = {  # pattern of keys: title of the chart, label of the values
    r"^total_loss$": ("Total loss", "loss"),
    r"loss(?!.*_\d+$)": ("Loss: {}", "loss"),  # inner decoder blocks (_0) repeat the last
    r"/AP(50|75)?$": ("{} on the test set", "AP (%)"),
    r"accuracy$|/top[15]$": ("Accuracy: {}", "accuracy (%)"),
    r"^correlation/mean$": ("Spatial correlation of the map", "mean |correlation|"),
    r"^lr$": ("Learning rate", "learning rate"),
    r"^gradient_norm$": ("Norm of the gradients", "norm"),
}
_FEW_POINTS = 25  # are marked
_LOG_SCALE_FROM = 100.0  # largest value by the smallest
_MOST_LINES = 6
_EXPLANATION = (
    "Losses are comparable only between runs of one model, so each model has charts of its own. "
    "Training losses are medians of the last steps. Where points are marked, there are few, and "
    "the values between them are unknown."
)


@dataclass(frozen=True)
class Quantity:
    """A logged key with the title of its chart and the label of its values."""

    key: str
    title: str
    label: str


@register_figure("curves")
def draw_curves(runs: Sequence[Run], options: FigureOptions, *, axis: Axis = "epochs") -> Figure:
    """Draws each logged quantity, one line per run.

    Raises:
        NotApplicable: no run has a log with positions on the axis.
    """
    logged, left_out = [], []
    for run in runs:
        if _find_length(run, axis):
            logged.append(run)
        else:
            left_out.append(f"'{run.label}' has no metrics.json with {AXES[axis]}")
    if not logged:
        raise NotApplicable(f"no curves: {'; '.join(left_out)}")
    labels = [run.label for run in logged]
    images: dict[str, Image] = {}
    data: dict[str, dict[str, Any]] = {label: {} for label in labels}
    for quantity in find_quantities([record for run in logged for record in run.metrics]):
        for model, own in _split_by_model(quantity, logged).items():
            curves = {run.label: select_curve(run, quantity.key, axis) for run in own}
            curves = {label: curve for label, curve in curves.items() if curve[0]}
            for label, (positions, values) in curves.items():
                data[label][quantity.key] = {axis: positions, "values": values}
            if any(len(positions) > 1 for positions, _ in curves.values()):  # else in the table
                name = re.sub(r"[^A-Za-z0-9]+", "-", f"{quantity.key} {model}").strip("-")
                title = f"{quantity.title}, {model}" if model else quantity.title
                images[name] = _draw_quantity(quantity, curves, axis, labels, title)
    paragraphs = [_EXPLANATION]
    if left_out:
        paragraphs.append(f"Left out: {'; '.join(left_out)}.")
    numbers = {"axis": axis, "runs": data, "left_out": left_out}
    return Figure("curves", "Training curves", paragraphs, images, numbers, _tabulate(logged))


@themed
def draw_training_curves(
    metrics_json: str | os.PathLike[str], output_png: str | os.PathLike[str]
) -> bool:
    """Draws losses, AP, learning rate and norm of the gradients of one run.

    Returns:
        Whether there was something to draw; otherwise no image is written.

    Raises:
        UserError: the image cannot be written.
    """
    records = read_metrics(Path(metrics_json)) if os.path.isfile(metrics_json) else []
    panels: dict[str, dict[str, Curve]] = {}
    for quantity in find_quantities(records):
        own = panels.setdefault(quantity.label, {})
        if len(own) < _MOST_LINES and not quantity.label.startswith("mean"):
            own[quantity.key] = read_series(records, quantity.key)
    panels = {label: curves for label, curves in panels.items() if curves}
    if not panels:
        return False
    columns, rows = min(2, len(panels)), math.ceil(len(panels) / 2)
    figure = start_figure(height=3.1 * rows, width=5.6 * columns)
    for index, (label, curves) in enumerate(panels.items(), start=1):
        axes = figure.add_subplot(rows, columns, index)
        _plot_lines(axes, curves, dict(zip(curves, list_styles(len(curves)), strict=True)))
        axes.set_xlabel("iteration")
        axes.set_ylabel(label)
        if len(curves) > 1:
            axes.legend()
    image = chart_image(figure, format="png")
    write_atomically(output_png, lambda stream: stream.write(image.content))
    return True


def has_step(record: Mapping[str, Any]) -> bool:
    """Whether a record of ``metrics.json`` has its iteration."""
    iteration = record.get("iteration")
    return isinstance(iteration, int | float) and math.isfinite(iteration)


def read_series(records: Sequence[Mapping[str, Any]], key: str) -> Curve:
    """Returns the iterations at which a key was logged, rising, and its values.

    Where a resumed run repeats an iteration, the later record counts. What is not finite is nan;
    both lists are empty if nothing is finite.
    """
    points = {
        float(record["iteration"]): float(record[key])
        for record in records
        if isinstance(record.get(key), int | float) and has_step(record)
    }
    if not any(map(math.isfinite, points.values())):
        return [], []
    iterations = sorted(points)
    values = [points[iteration] for iteration in iterations]
    return iterations, [value if math.isfinite(value) else math.nan for value in values]


def find_quantities(records: Sequence[Mapping[str, Any]]) -> list[Quantity]:
    """Returns what a log holds, in the order of ``_QUANTITIES``; AP of single classes is not."""
    keys = dict.fromkeys(key for record in records for key in record)
    found: dict[str, Quantity] = {}
    for pattern, (title, label) in _QUANTITIES.items():
        for key in keys:
            if key not in found and re.search(pattern, key) and read_series(records, key)[0]:
                found[key] = Quantity(key, title.format(key), label)
    return list(found.values())


def select_curve(run: Run, key: str, axis: Axis) -> Curve:
    """Returns positions on the axis and values of a key; empty where positions are unknown."""
    iterations, values = read_series(run.metrics, key)
    if axis == "epochs":
        epochs = dict(zip(*read_series(run.metrics, "epoch"), strict=True))
        known = [(epochs[i], value) for i, value in zip(iterations, values, strict=True)
                 if i in epochs]  # fmt: skip
        return [epoch for epoch, _ in known], [value for _, value in known]
    batch = 1 if axis == "steps" else _read_config(run, "SOLVER", "IMS_PER_BATCH")
    return ([(i + 1) * batch for i in iterations], values) if batch else ([], [])


def _draw_quantity(
    quantity: Quantity, curves: Mapping[str, Curve], axis: Axis, labels: Sequence[str], title: str
) -> Image:
    figure, axes = start_chart(height=3.2, width=5.2)
    styles = dict(zip(labels, list_styles(len(labels)), strict=True))
    _plot_lines(axes, curves, styles)  # a run has one colour in all charts
    axes.set_title(title)
    axes.set_xlabel(AXES[axis])
    axes.set_ylabel(quantity.label)
    add_legend(figure, axes)
    ends = "; ".join(
        f"{label} ends at {_last(values):.4g}" for label, (_, values) in curves.items()
    )
    return chart_image(figure, alt=f"{title} over {AXES[axis]}: {ends}", caption=f"{ends}.")


def _plot_lines(
    axes: Axes, curves: Mapping[str, Curve], styles: Mapping[str, dict[str, Any]]
) -> None:
    for name, (positions, values) in curves.items():
        marker = styles[name]["marker"] if len(positions) < _FEW_POINTS else ""
        axes.plot(positions, values, label=to_text(name), **styles[name] | {"marker": marker})
    finite = [v for _, values in curves.values() for v in values if math.isfinite(v)]
    if finite and min(finite) > 0 and max(finite) > _LOG_SCALE_FROM * min(finite):
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=min(0, *finite))
    axes.set_xlim(left=0)


def _split_by_model(quantity: Quantity, runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Returns all runs under "", or, for a loss, the runs of each model if there are several."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        if read_series(run.metrics, quantity.key)[0]:
            model = str(_read_config(run, "MODEL", "META_ARCHITECTURE") or "unknown model")
            groups.setdefault(model if quantity.label == "loss" else "", []).append(run)
    return groups if len(groups) > 1 else {"": [run for own in groups.values() for run in own]}


def _tabulate(runs: Sequence[Run]) -> Table:
    records = [record for run in runs for record in run.metrics]
    keys = [quantity.key for quantity in find_quantities(records)
            if quantity.label.endswith("(%)") or quantity.key == "total_loss"]  # fmt: skip
    rows = []
    for run in runs:
        lengths = [_find_length(run, axis) or math.nan for axis in AXES]
        last = [_last(read_series(run.metrics, key)[1]) for key in keys]
        rows.append((run.label, *(_format(value) for value in (*lengths, *last))))
    return Table(("Run", *AXES.values(), *keys), rows)


def _format(value: float) -> str:
    if math.isnan(value):
        return "n/a"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _last(values: Sequence[float]) -> float:
    return next((value for value in reversed(values) if math.isfinite(value)), math.nan)


def _find_length(run: Run, axis: Axis) -> float:
    """Returns the last position on the axis; 0 where it is unknown."""
    return max(select_curve(run, "iteration", axis)[0], default=0)


def _read_config(run: Run, node: str, key: str) -> Any:
    """Returns a key of ``config.yaml`` of a run; None if it cannot be read."""
    try:
        return yaml.safe_load((run.path / "config.yaml").read_bytes())[node][key]
    except (OSError, yaml.YAMLError, LookupError, TypeError, RecursionError):
        return None
