# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Training curves of several runs on one axis: epochs, images seen, minutes or steps.

The paper compares schedules by their length in epochs (Fig. 6, 11). Runs that differ in batch
size or data meet on images, and those that differ in what a step costs, on minutes.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from matplotlib.axes import Axes

from .charts import (
    INK,
    LINE,
    Format,
    Theme,
    encode,
    has_step,
    list_styles,
    start_figure,
    to_text,
)
from .training_curves import Series, collect_series

Axis = Literal["epochs", "images", "minutes", "steps"]
AXES: tuple[Axis, ...] = get_args(Axis)
AXIS_LABELS: Mapping[Axis, str] = {
    "epochs": "epochs",
    "images": "images seen",
    "minutes": "minutes of training",
    "steps": "steps",
}
_POINTS_WITH_MARKERS = 25
_LOG_SCALE_FROM = 100.0
_LEGEND_INSIDE = 3
_WIDTH = 5.2  # inches: small, so that letters stay legible on a phone


@dataclass(frozen=True)
class Run:
    """One run's log.

    Attributes:
        label: in legends.
        records: lines of its ``metrics.json``, in order.
        images_per_step: of all processes together.
        model: its kind: losses of two kinds are different things. "" where it is not known.
        recipe: the same in runs that differ in schedule alone. "" where it is not known.
    """

    label: str
    records: Sequence[Mapping[str, Any]]
    images_per_step: int
    model: str = ""
    recipe: str = ""


@dataclass(frozen=True)
class Quantity:
    """One thing that is drawn against the axis.

    Attributes:
        name: of files.
        title: of the chart.
        label: of the values, with their unit.
        keys: what logs call it.
        from_zero: whether the axis of values begins at 0.
    """

    name: str
    title: str
    label: str
    keys: tuple[str, ...]
    from_zero: bool = False


def list_quantities(runs: Sequence[Run]) -> list[Quantity]:
    """Returns what the logs hold: losses, scores, spatial correlation, learning rate, gradients.

    Losses of inner decoder blocks (``loss_ce_0``), which repeat those of the last, and AP of
    single classes and sizes are left out.
    """
    keys = list(dict.fromkeys(key for run in runs for record in run.records for key in record))
    keys = [key for key in keys if any(collect_series(run.records, [key]) for run in runs)]
    found = []
    for key in sorted(keys, key=_rank):
        for pattern, describe in _KINDS:
            if re.search(pattern, key):
                found.append(describe(key))
                break
    return found


def place_on_axis(run: Run, axis: Axis) -> dict[int, float]:
    """Returns where each logged iteration of a run lies, counted when its step is done.

    Minutes are the sum of what the log calls ``time``, the median duration of the last steps, over
    all steps: no evaluation, no pause between a stop and a resumption, no step twice, and little
    of single slow steps.

    Args:
        run: iterations count from 0.
        axis: what is counted.

    Returns:
        Positions by iteration, rising; empty where the log does not tell them.
    """
    iterations = sorted({int(record["iteration"]) for record in run.records if has_step(record)})
    if axis == "steps":
        return {iteration: iteration + 1.0 for iteration in iterations}
    if axis == "images":
        return {iteration: (iteration + 1.0) * run.images_per_step for iteration in iterations}
    if axis == "epochs":
        epochs = collect_series(run.records, ["epoch"]).get("epoch", ([], []))
        return {int(iteration): epoch for iteration, epoch in zip(*epochs, strict=True)}
    return _sum_minutes(run, iterations)


def select_curve(run: Run, key: str, axis: Axis) -> tuple[list[float], list[float]]:
    """Returns positions on the axis and values of one key; where a step was repeated, the later.

    Values that are not finite are nan.
    """
    positions = place_on_axis(run, axis)
    iterations, values = collect_series(run.records, [key]).get(key, ([], []))
    points = [
        (positions[int(iteration)], value)
        for iteration, value in zip(iterations, values, strict=True)
        if int(iteration) in positions
    ]
    return [x for x, _ in points], [value for _, value in points]


def plot_run_curves(
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    *,
    title: str,
    label: str,
    axis: Axis,
    from_zero: bool = False,
    among: Sequence[str] = (),
    theme: Theme = "light",
    format: Format = "svg",
) -> bytes:
    """Draws a line for each run; the few points of a score are marked, and joined.

    Args:
        curves: positions and values by the run's label; nan is a gap.
        title: of the chart.
        label: of the values, with their unit.
        axis: what the positions count.
        from_zero: begin the axis of values at 0. Else a log scale is taken for values above 0 that
            span two orders of magnitude.
        among: labels of all runs of the page, among which each keeps its colour and marker; these
            curves' own where there are no others.
        theme: of the page.
        format: of the file.
    """
    rows = _count_legend_rows(len(curves))
    figure, axes = start_figure(theme, height=3.2 + 0.2 * rows, width=_WIDTH)
    everyone = list(among or curves)
    styles = dict(zip(everyone, list_styles(theme, len(everyone)), strict=True))
    for name, (positions, values) in curves.items():
        few = len(positions) < _POINTS_WITH_MARKERS
        style = styles[name] if few else _bare(styles[name])
        axes.plot(positions, values, label=to_text(name), lw=1.8, ms=4.5, **style)
    _scale(axes, [value for _, values in curves.values() for value in values], from_zero)
    axes.set_title(title, fontsize=11, loc="left", color=INK[theme])
    axes.set_xlabel(AXIS_LABELS[axis])
    axes.set_ylabel(label)
    axes.set_xlim(left=0)
    axes.grid(color=LINE[theme])
    if len(curves) > _LEGEND_INSIDE:
        figure.legend(
            loc="outside lower center", ncols=2, fontsize=8, frameon=False, labelcolor=INK[theme]
        )
    elif len(everyone) > 1:  # else a colour would be read as that of another chart
        axes.legend(fontsize=9, frameon=False, labelcolor=INK[theme])
    return encode(figure, theme, format)


def plot_schedules(
    scores: Mapping[str, Mapping[str, tuple[float, float]]],
    *,
    label: str,
    axis: Axis,
    recipes: Mapping[str, str] | None = None,
    theme: Theme = "light",
    format: Format = "svg",
) -> bytes:
    """Draws what runs came to against their length, a point a score, with the run's name once.

    A line joins runs of one recipe, as in Fig. 6 of the paper, and no others: of two models the
    longer run says nothing about schedules.

    Args:
        scores: by the score's name and the run's label: length of the run and its last score.
        label: of the scores, with their unit.
        axis: what the length counts.
        recipes: of the runs, by label, see ``Run``; those that are not there or "" stand alone.
        theme: of the page.
        format: of the file.
    """
    figure, axes = start_figure(theme, height=3.2, width=_WIDTH)
    tops: dict[str, tuple[float, float]] = {}
    for index, (name, points) in enumerate(scores.items()):
        style = list_styles(theme, index + 1)[index]
        shown = to_text(name)
        for group in group_recipes(points, recipes or {}):
            rising = sorted(points[run] for run in group)
            line = style if len(rising) > 1 else style | {"linestyle": "none"}
            axes.plot(*zip(*rising, strict=True), label=shown, lw=1.4, ms=6, **line)
            shown = "_nolegend_"
        for run, (length, score) in points.items():
            tops[run] = (length, max(score, tops[run][1] if run in tops else score))
    for run, top in tops.items():
        axes.annotate(
            to_text(run), top, xytext=(0, 7), textcoords="offset points", ha="center", fontsize=8,
            color=INK[theme],
        )  # fmt: skip
    axes.set_title("Last score by length of the run", fontsize=11, loc="left", color=INK[theme])
    axes.set_xlabel(AXIS_LABELS[axis])
    axes.set_ylabel(label)
    axes.margins(x=0.15, y=0.2)
    axes.set_ylim(bottom=0)
    axes.grid(color=LINE[theme])
    if len(scores) > 1:
        axes.legend(fontsize=9, frameon=False, labelcolor=INK[theme])
    return encode(figure, theme, format)


def group_recipes(runs: Iterable[str], recipes: Mapping[str, str]) -> list[list[str]]:
    """Returns labels of runs, together where they have one recipe that is known."""
    groups: dict[tuple[str, str], list[str]] = {}
    for run in runs:
        recipe = recipes.get(run, "")
        groups.setdefault((recipe, "" if recipe else run), []).append(run)
    return list(groups.values())


def _sum_minutes(run: Run, iterations: Sequence[int]) -> dict[int, float]:
    found: Series = collect_series(run.records, ["time"])
    if not found:
        return {}
    seconds = {
        int(iteration): value
        for iteration, value in zip(*found["time"], strict=True)
        if math.isfinite(value)
    }
    each = seconds[min(seconds)]  # until the first is logged
    done, total, positions = 0, 0.0, {}
    for iteration in iterations:
        each = seconds.get(iteration, each)
        total += each * (iteration + 1 - done) / 60
        done = iteration + 1
        positions[iteration] = total
    return positions


def _bare(style: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in style.items() if key != "marker"}


def _count_legend_rows(number: int) -> int:
    return math.ceil(number / 2) if number > _LEGEND_INSIDE else 0


def _scale(axes: Axes, values: Sequence[float], from_zero: bool) -> None:
    finite = [value for value in values if math.isfinite(value)]
    if from_zero or not finite:
        axes.set_ylim(bottom=0)
    elif min(finite) > 0 and max(finite) > _LOG_SCALE_FROM * min(finite):
        axes.set_yscale("log")


def _describe_loss(key: str) -> Quantity:
    title = "Total loss" if key == "total_loss" else f"Loss: {key}"
    return Quantity(_name(key), title, "loss", (key,))


def _describe_ap(key: str) -> Quantity:
    return Quantity(_name(key), f"{key.rsplit('/', 1)[-1]} on the test set", "AP (%)", (key,), True)


def _describe_accuracy(key: str) -> Quantity:
    title = _ACCURACIES.get(key, f"Accuracy: {key}")
    return Quantity(_name(key), title, "accuracy (%)", (key,), True)


def _name(key: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", key).strip("-")


# What is measured on a batch in training is no score of a test set.
_ACCURACIES = {
    "accuracy": "Classes told right, training batch",
    "contrast_accuracy": "Queries that find their own key, training batch",
}

_KINDS: tuple[tuple[str, Callable[[str], Quantity]], ...] = (
    (r"loss(?!.*_\d+$)", _describe_loss),
    (r"/AP(50|75)?$", _describe_ap),
    (r"accuracy$|/top[15]$", _describe_accuracy),
    (
        r"^correlation/mean$",
        lambda key: Quantity(_name(key), "Spatial correlation of the map",
                             "mean |correlation| of two positions", (key,)),
    ),
    (
        r"^lr$",
        lambda key: Quantity("learning-rate", "Schedule of the learning rate", "learning rate",
                             (key,), True),
    ),
    (
        r"^gradient_norm$",
        lambda key: Quantity("gradient-norm", "Norm of the gradients", "norm", (key,)),
    ),
)  # fmt: skip


def _rank(key: str) -> tuple[int, bool]:
    """Orders kinds as above, the total loss first of the losses."""
    ranks = (index for index, (pattern, _) in enumerate(_KINDS) if re.search(pattern, key))
    return next(ranks, len(_KINDS)), key != "total_loss"
