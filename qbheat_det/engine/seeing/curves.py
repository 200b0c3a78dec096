# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The sight "curves": what runs logged, on one axis."""

import argparse
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import yaml

from qbheat_det.analysis.exhibit import Exhibit
from qbheat_det.analysis.html_report import Picture, Table
from qbheat_det.analysis.run_curves import (
    AXES,
    AXIS_LABELS,
    Axis,
    Quantity,
    Run,
    group_recipes,
    list_quantities,
    place_on_axis,
    plot_run_curves,
    plot_schedules,
    select_curve,
)
from qbheat_det.core.errors import UserError

from .options import SightOptions
from .refusal import NothingToSee
from .run_sets import read_sources
from .subject import Subject

Curves = Mapping[str, tuple[list[float], list[float]]]

# Lengths that differ by less are one schedule.
_SAME_LENGTH = 0.05
_HOW_TO_READ = (
    "Losses are comparable between runs of one objective alone, so each has charts of its own; "
    "those of a training batch are medians of the last steps. Points that are marked are few, and "
    "nothing is known between them."
)
# What may differ between runs that differ in schedule alone, or makes no difference.
_SCHEDULE = {
    "": {"OUTPUT_DIR", "SEED", "VIS_PERIOD", "CUDNN_BENCHMARK"},
    "MODEL": {"DEVICE"},
    "SOLVER": {
        *("EPOCHS", "MAX_ITER", "STEPS", "STEP_EPOCHS", "WARMUP_EPOCHS", "WARMUP_ITERS"),
        *("CHECKPOINT_PERIOD", "CHECKPOINT_EPOCHS", "CHECKPOINTS_KEPT", "LOG_PERIOD"),
        "WANDB_PROJECT",
    },
    "TEST": {"EVAL_PERIOD", "EVAL_EPOCHS"},
}


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
    labels = [run.label for run in runs]
    for quantity in list_quantities(runs):
        for one, own in _split_by_model(quantity, runs):
            curves = {run.label: select_curve(run, one.keys[0], axis) for run in own}
            curves = {label: curve for label, curve in curves.items() if curve[0]}
            if not any(len(positions) > 1 for positions, _ in curves.values()):
                continue  # a single score is in the table
            for label, (positions, values) in curves.items():
                figures[label][one.keys[0]] = {axis: positions, "values": values}
            pictures[one.name] = _draw(one, curves, axis, labels)
    scores = _last_scores(runs, axis)
    if len(runs) > 1 and _differ_in_length(scores):
        pictures["schedules"] = _draw_schedules(scores, runs, axis)
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
            left_out.append(f"'{subject.label}' {_say_what_it_lacks(subject)}")
            continue
        batch, model = 0, ""
        try:
            batch = int(subject.cfg.SOLVER.IMS_PER_BATCH)
            model = str(subject.cfg.MODEL.META_ARCHITECTURE)
        except (UserError, NothingToSee):  # of another version; only the axis of images needs it
            pass
        run = Run(subject.label, subject.metrics, batch, model, _read_recipe(subject))
        if not place_on_axis(run, axis) or (axis == "images" and not batch):
            left_out.append(f"the log of '{subject.label}' does not tell {AXIS_LABELS[axis]}")
        else:
            runs.append(run)
    return runs, left_out


def _say_what_it_lacks(subject: Subject) -> str:
    if subject.folder is None:
        return "is no folder of a run"
    there = (subject.folder / "metrics.json").is_file()
    return "has a metrics.json without a record" if there else "has no metrics.json"


def _read_recipe(subject: Subject) -> str:
    """Returns config and data of a run but for its schedule; "" where they are not told."""
    if subject.folder is None:
        return ""
    try:
        text = (subject.folder / "config.yaml").read_text(encoding="utf-8")
        config = yaml.safe_load(text)
        sources = read_sources(subject.folder)
        for part, names in _SCHEDULE.items():
            node = config[part] if part else config
            for name in names:
                node.pop(name, None)
        return json.dumps([config, sources], sort_keys=True, default=str)
    except (OSError, ValueError, yaml.YAMLError, LookupError, AttributeError, TypeError,
            RecursionError, NothingToSee, UserError):  # fmt: skip
        return ""


def _split_by_model(
    quantity: Quantity, runs: Sequence[Run]
) -> Iterator[tuple[Quantity, Sequence[Run]]]:
    """Yields a quantity for all runs, or a loss for those of each kind of model that has it."""
    having = [run for run in runs if select_curve(run, quantity.keys[0], "steps")[0]]
    models = list(dict.fromkeys(run.model for run in having))
    if quantity.label != "loss" or len(models) < 2:
        yield quantity, having
        return
    for index, model in enumerate(models):
        title = f"{quantity.title}, {model or 'unknown model'}"
        name = f"{quantity.name}_{index}"
        yield (
            replace(quantity, name=name, title=title),
            [run for run in having if run.model == model],
        )


def _explain(axis: Axis, left_out: Sequence[str]) -> list[str]:
    paragraphs = [_HOW_TO_READ]
    if axis == "minutes":
        paragraphs.append(
            "Minutes are the logged durations added up, medians of the last steps: without "
            "evaluations, looks and pauses, with little of single slow steps, and on whatever "
            "machine the run had."
        )
    if left_out:
        paragraphs.append(f"Left out: {'; '.join(left_out)}.")
    return paragraphs


def _draw(quantity: Quantity, curves: Curves, axis: Axis, among: Sequence[str]) -> Picture:
    digits = ".2f" if quantity.label.endswith("(%)") else ".4g"
    ends = "; ".join(
        f"{label} ends at {_format(_last(values), digits)}" for label, (_, values) in curves.items()
    )
    return Picture.from_chart(
        lambda theme: plot_run_curves(
            curves,
            title=quantity.title,
            label=quantity.label,
            axis=axis,
            from_zero=quantity.from_zero,
            among=among,
            theme=theme,
        ),
        alt=f"{quantity.title}, {quantity.label}, against {AXIS_LABELS[axis]}: {ends}",
        caption=f"{ends}.",
    )


def _draw_schedules(
    scores: Mapping[str, Mapping[str, tuple[float, float]]], runs: Sequence[Run], axis: Axis
) -> Picture:
    recipes = {run.label: run.recipe for run in runs}
    ends = "; ".join(
        f"{key} of {label} after {length:.4g}: {score:.4g}"
        for key, points in scores.items()
        for label, (length, score) in points.items()
    )
    are_joined = any(len(group) > 1 for group in group_recipes(recipes, recipes))
    caption = "Last score against the length of the run. " + (
        "A line joins runs that differ in schedule alone, as in Fig. 6 of the paper."
        if are_joined
        else "No line: no two of these runs are known to differ in schedule alone."
    )
    return Picture.from_chart(
        lambda theme: plot_schedules(
            scores, label="per cent", axis=axis, recipes=recipes, theme=theme
        ),
        alt=f"{caption} {AXIS_LABELS[axis]}: {ends}",
        caption=caption,
    )


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
        cells = [_format(length, ",.0f" if length >= 100 else ".3g") for length in lengths]
        cells += [
            _format(value, ".4g" if key == "total_loss" else ".2f")
            for key, value in zip(keys, last, strict=True)
        ]
        rows.append((run.label, *cells))
    return Table(("Run", *(AXIS_LABELS[axis] for axis in AXES), *keys), rows)


def _format(value: float, digits: str) -> str:
    return "n/a" if math.isnan(value) else format(value, digits)


def _last(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return finite[-1] if finite else math.nan
