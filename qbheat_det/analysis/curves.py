# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Training curves of several runs over epochs, images seen or steps."""

import math
import os
import re
from collections.abc import Mapping, Sequence
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
from .training_log import Curve, Quantity, find_quantities, flatten, has_step, read_series

Axis = Literal["epochs", "images", "steps"]
AXES: dict[Axis, str] = {"epochs": "epochs", "images": "images seen", "steps": "steps"}
_FEW_POINTS = 25  # are marked
_LOG_SCALE_FROM = 100.0  # largest value by the smallest
_MOST_LINES = 6
_EXPLANATION = (
    "Losses are comparable only between runs of one model, so each model has charts of its own. "
    "Training losses are medians of the last steps. Where points are marked, there are few, and "
    "the values between them are unknown."
)


@register_figure("curves")
def draw_curves(runs: Sequence[Run], options: FigureOptions, *, axis: Axis = "epochs") -> Figure:
    """Draws each logged quantity, one line per run.

    Raises:
        NotApplicable: no run has a log with positions on the axis.
    """
    logged, left_out = [], []
    for run in runs:
        if find_positions(run, axis):
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


def find_positions(run: Run, axis: Axis) -> dict[float, float]:
    """Returns the position on the axis after each logged iteration; empty where it is unknown."""
    iterations = sorted({float(record["iteration"]) for record in run.metrics if has_step(record)})
    if axis == "steps":
        return {iteration: iteration + 1 for iteration in iterations}
    if axis == "images":
        batch = _read_config(run).get("SOLVER.IMS_PER_BATCH", 0)
        return {iteration: (iteration + 1) * batch for iteration in iterations if batch}
    return dict(zip(*read_series(run.metrics, "epoch"), strict=True))


def select_curve(run: Run, key: str, axis: Axis) -> Curve:
    """Returns positions on the axis and values of a key."""
    positions = find_positions(run, axis)
    points = dict(zip(*read_series(run.metrics, key), strict=True))
    points = {i: value for i, value in points.items() if i in positions}
    return [positions[i] for i in points], list(points.values())


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
            model = str(_read_config(run).get("MODEL.META_ARCHITECTURE", "unknown model"))
            groups.setdefault(model if quantity.label == "loss" else "", []).append(run)
    return groups if len(groups) > 1 else {"": [run for own in groups.values() for run in own]}


def _tabulate(runs: Sequence[Run]) -> Table:
    records = [record for run in runs for record in run.metrics]
    keys = [quantity.key for quantity in find_quantities(records)
            if quantity.is_score or quantity.key == "total_loss"]  # fmt: skip
    rows = []
    for run in runs:
        lengths = [max(find_positions(run, axis).values(), default=math.nan) for axis in AXES]
        last = [_last(read_series(run.metrics, key)[1]) for key in keys]
        rows.append((run.label, *(_format(value) for value in (*lengths, *last))))
    return Table(("Run", *AXES.values(), *keys), rows)


def _format(value: float) -> str:
    if math.isnan(value):
        return "n/a"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _last(values: Sequence[float]) -> float:
    return next((value for value in reversed(values) if math.isfinite(value)), math.nan)


def _read_config(run: Run) -> dict[str, Any]:
    """Returns ``config.yaml`` of a run, its keys dotted; empty if it cannot be read."""
    try:
        return flatten(yaml.safe_load((run.path / "config.yaml").read_bytes()))
    except (OSError, yaml.YAMLError, AttributeError, RecursionError):
        return {}
