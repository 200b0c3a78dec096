# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The sight "curves": what runs logged, on one axis."""

import argparse
import math
from collections.abc import Sequence
from typing import Any

from qbheat_det.analysis.charts import darken
from qbheat_det.analysis.exhibit import Exhibit
from qbheat_det.analysis.html_report import Picture, Table
from qbheat_det.analysis.run_curves import (
    AXES,
    AXIS_LABELS,
    Axis,
    Quantity,
    Run,
    list_quantities,
    place_on_axis,
    plot_run_curves,
    plot_schedules,
    select_curve,
)
from qbheat_det.errors import UserError

from .options import SightOptions
from .refusal import NothingToSee
from .subject import Subject

_SVG = "image/svg+xml"
# Lengths that differ by less are one schedule.
_SAME_LENGTH = 0.05
_HOW_TO_READ = (
    "Losses are comparable between runs of one objective alone; those of a training batch are "
    "medians of the last steps. Points that are marked are few, and nothing is known between them."
)


def add_curve_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the sight's flags."""
    parser.add_argument(
        "--axis",
        choices=AXES,
        default="epochs",
        help="what is counted along x: epochs (default); images, for runs of different batches or "
        "data; minutes of training, without evaluations; steps",
    )


def see_curves(subjects: Sequence[Subject], options: SightOptions) -> Exhibit:
    """Draws each logged quantity, one line a run.

    Raises:
        NothingToSee: no run has a log that tells the axis.
    """
    axis: Axis = options.extra.get("axis", "epochs")
    runs, left_out = _read_runs(subjects, axis)
    if not runs:
        raise NothingToSee(f"no curves: {'; '.join(left_out)}")
    pictures: dict[str, Picture] = {}
    figures: dict[str, Any] = {run.label: {} for run in runs}
    scores: dict[str, dict[str, tuple[float, float]]] = {}
    for quantity in list_quantities(runs):
        curves = {run.label: select_curve(run, quantity.keys[0], axis) for run in runs}
        curves = {label: curve for label, curve in curves.items() if curve[0]}
        if not any(len(positions) > 1 for positions, _ in curves.values()):
            continue  # a single score is in the table
        for label, (positions, values) in curves.items():
            figures[label][quantity.keys[0]] = {axis: positions, "values": values}
        pictures[quantity.name] = _draw(quantity, curves, axis)
    scores = _last_scores(runs, axis)
    if len(runs) > 1 and _differ_in_length(scores):
        pictures["schedules"] = _draw_schedules(scores, axis)
    return Exhibit(
        "curves",
        "Training curves",
        _explain(axis, left_out),
        pictures,
        {"axis": axis, "runs": figures, "left_out": left_out},
        _tabulate(runs),
    )


def _read_runs(subjects: Sequence[Subject], axis: Axis) -> tuple[list[Run], list[str]]:
    runs, left_out = [], []
    for subject in subjects:
        if not subject.metrics:
            where = "is a file of weights" if subject.folder is None else "has no metrics.json"
            left_out.append(f"'{subject.label}' {where}")
            continue
        try:
            batch = int(subject.cfg.SOLVER.IMS_PER_BATCH)
        except UserError:  # a config of another version, which only the axis of images needs
            batch = 0
        run = Run(subject.label, subject.metrics, batch)
        if not place_on_axis(run, axis) or (axis == "images" and not batch):
            left_out.append(f"the log of '{subject.label}' does not tell {AXIS_LABELS[axis]}")
        else:
            runs.append(run)
    return runs, left_out


def _explain(axis: Axis, left_out: Sequence[str]) -> list[str]:
    paragraphs = [_HOW_TO_READ]
    if axis == "minutes":
        paragraphs.append(
            "Minutes are the steps' own, as logged: without evaluations, looks and pauses, and on "
            "whatever machine the run had."
        )
    if left_out:
        paragraphs.append(f"Left out: {'; '.join(left_out)}.")
    return paragraphs


def _draw(
    quantity: Quantity, curves: dict[str, tuple[list[float], list[float]]], axis: Axis
) -> Picture:
    chart = plot_run_curves(
        curves,
        title=quantity.title,
        label=quantity.label,
        axis=axis,
        from_zero=quantity.from_zero,
    )
    ends = "; ".join(
        f"{label} ends at {_last(values):.4g}" for label, (_, values) in curves.items()
    )
    alt = f"{quantity.title}, {quantity.label}, against {AXIS_LABELS[axis]}: {ends}"
    return Picture(chart, _SVG, alt, caption=f"{ends}.", dark=darken(chart))


def _draw_schedules(scores: dict[str, dict[str, tuple[float, float]]], axis: Axis) -> Picture:
    chart = plot_schedules(scores, label="per cent", axis=axis)
    ends = "; ".join(
        f"{key} of {label} after {length:.4g}: {score:.4g}"
        for key, points in scores.items()
        for label, (length, score) in points.items()
    )
    caption = "Last score against the length of the run, as in Fig. 6 of the paper."
    return Picture(chart, _SVG, f"{caption} {AXIS_LABELS[axis]}: {ends}", caption, darken(chart))


def _last_scores(runs: Sequence[Run], axis: Axis) -> dict[str, dict[str, tuple[float, float]]]:
    """Returns length and last score of each run by score and run, of scores in per cent."""
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for quantity in list_quantities(runs):
        if not quantity.label.endswith("(%)"):
            continue
        for run in runs:
            positions, values = select_curve(run, quantity.keys[0], axis)
            if positions and math.isfinite(_last(values)):
                found.setdefault(quantity.keys[0], {})[run.label] = (
                    max(place_on_axis(run, axis).values()),
                    _last(values),
                )
    return {key: points for key, points in found.items() if len(points) > 1}


def _differ_in_length(scores: dict[str, dict[str, tuple[float, float]]]) -> bool:
    lengths = [length for points in scores.values() for length, _ in points.values()]
    return bool(lengths) and min(lengths) < (1 - _SAME_LENGTH) * max(lengths)


def _tabulate(runs: Sequence[Run]) -> Table:
    keys = [
        quantity.keys[0]
        for quantity in list_quantities(runs)
        if quantity.label.endswith("(%)") or quantity.keys[0] == "total_loss"
    ]
    rows = []
    for run in runs:
        lengths = [max(place_on_axis(run, axis).values(), default=math.nan) for axis in AXES]
        last = [_last(select_curve(run, key, "steps")[1]) for key in keys]
        rows.append((run.label, *(f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
                                  for value in lengths), *map(_format, last)))  # fmt: skip
    return Table(("Run", *(AXIS_LABELS[axis] for axis in AXES), *keys), rows)


def _format(value: float) -> str:
    return "n/a" if math.isnan(value) else f"{value:.4g}"


def _last(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return finite[-1] if finite else math.nan
