# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Runs on one axis, against arithmetic by hand; and what the charts show of them."""

import math
from typing import Any

import cv2
import numpy as np
import pytest
from matplotlib.axes import Axes

from qbheat_det.analysis.run_curves import (
    Run,
    group_recipes,
    list_quantities,
    place_on_axis,
    plot_run_curves,
    plot_schedules,
    select_curve,
)


def log(iteration: int, **values: Any) -> dict[str, Any]:
    return {"iteration": iteration, **values}


# Logged every 10 steps. Killed after iteration 29, and resumed from a checkpoint after 19.
RUN = Run(
    "resumed",
    [
        log(9, time=2.0, epoch=0.5, total_loss=4.0),
        log(19, time=3.0, epoch=1.0, total_loss=3.0),
        log(29, time=9.0, epoch=1.5, total_loss=9.0),
        log(29, time=6.0, epoch=1.5, total_loss=2.0),
        log(34, epoch=1.75, **{"bbox/AP": 12.0}),
        log(39, time=1.0, epoch=2.0, total_loss=math.inf),
    ],
    images_per_step=8,
)


def test_minutes_are_steps_times_their_logged_duration_and_no_step_counts_twice() -> None:
    # 10 x 2 s, 10 x 3 s, 10 x 6 s (of the resumption); 5 more as the last known, 5 x 1 s.
    seconds = {9: 20, 19: 50, 29: 110, 34: 140, 39: 145}
    minutes = {iteration: value / 60 for iteration, value in seconds.items()}
    assert place_on_axis(RUN, "minutes") == pytest.approx(minutes)


def test_images_steps_and_epochs_are_counted_when_a_step_is_done() -> None:
    assert place_on_axis(RUN, "steps") == {9: 10, 19: 20, 29: 30, 34: 35, 39: 40}
    assert place_on_axis(RUN, "images") == {9: 80, 19: 160, 29: 240, 34: 280, 39: 320}
    assert place_on_axis(RUN, "epochs") == {9: 0.5, 19: 1.0, 29: 1.5, 34: 1.75, 39: 2.0}


def test_the_later_of_two_records_of_a_step_counts_and_infinity_is_a_gap() -> None:
    positions, values = select_curve(RUN, "total_loss", "epochs")
    assert positions == [0.5, 1.0, 1.5, 2.0]
    assert values[:3] == [4.0, 3.0, 2.0]
    assert math.isnan(values[3])
    assert select_curve(RUN, "bbox/AP", "images") == ([280.0], [12.0])
    assert select_curve(RUN, "bbox/AP50", "images") == ([], [])


def test_a_log_that_does_not_tell_an_axis_has_no_place_on_it() -> None:
    bare = Run("bare", [log(0, total_loss=1.0), {"total_loss": 3.0}], images_per_step=1)
    assert place_on_axis(bare, "epochs") == {}
    assert place_on_axis(bare, "minutes") == {}
    assert place_on_axis(bare, "steps") == {0: 1}
    odd = [{"iteration": step, "total_loss": 1.0} for step in ("none", math.nan, math.inf, None, 4)]
    assert select_curve(Run("odd", odd, 1), "total_loss", "steps") == ([5.0], [1.0])


def test_the_total_loss_comes_first_and_repetitions_and_details_are_left_out() -> None:
    keys = ["lr", "bbox/AP-cat", "bbox/APs", "bbox/AP50", "loss_ce_0", "loss_ce", "knn/top1",
            "accuracy", "total_loss", "data_time", "reconstruction/loss_corner"]  # fmt: skip
    records = [log(0, never=math.nan, **dict.fromkeys(keys, 1.0))]
    found = list_quantities([Run("all", records, 1)])
    assert [quantity.keys[0] for quantity in found] == [
        *("total_loss", "loss_ce", "reconstruction/loss_corner"),
        *("bbox/AP50", "knn/top1", "accuracy", "lr"),
    ]
    assert len({quantity.name for quantity in found}) == len(found)
    titles = {quantity.keys[0]: quantity.title for quantity in found}
    assert titles["accuracy"] == "Classes told right, training batch"
    assert titles["knn/top1"] == "Accuracy: knn/top1"
    (likeness,) = list_quantities([Run("all", [log(0, **{"correlation/mean": 0.5})], 1)])
    assert likeness.label == "mean |correlation| of two positions"


@pytest.fixture
def axes(monkeypatch: pytest.MonkeyPatch) -> list[Axes]:
    """The axes that charts are drawn on, kept for a look."""
    from qbheat_det.analysis import run_curves

    kept: list[Axes] = []

    def start(*args: Any, **kwargs: Any) -> Any:
        figure, drawn = start_figure(*args, **kwargs)
        kept.append(drawn)
        return figure, drawn

    start_figure = run_curves.start_figure
    monkeypatch.setattr(run_curves, "start_figure", start)
    return kept


def test_few_points_are_marked_and_joined_and_many_are_a_line(axes: list[Axes]) -> None:
    many = [float(value) for value in range(1, 100)]
    curves = {"dense": (many, many), "sparse": ([10.0, 90.0], [3.0, 5.0])}
    plot_run_curves(curves, title="AP on the test set", label="AP (%)", axis="epochs")
    dense, sparse = axes[0].get_lines()
    assert dense.get_marker() in ("", "None")
    assert sparse.get_marker() == "s"
    assert sparse.get_linestyle() == "-"
    np.testing.assert_array_equal(sparse.get_xdata(), [10.0, 90.0])
    np.testing.assert_array_equal(sparse.get_ydata(), [3.0, 5.0])
    assert (axes[0].get_xlabel(), axes[0].get_ylabel()) == ("epochs", "AP (%)")
    assert axes[0].get_title(loc="left") == "AP on the test set"
    assert [text.get_text() for text in axes[0].get_legend().get_texts()] == ["dense", "sparse"]
    assert axes[0].get_yscale() == "linear"


def test_an_exploding_loss_takes_a_log_scale_and_a_score_begins_at_zero(axes: list[Axes]) -> None:
    curves = {"run": ([1.0, 2.0, 3.0], [0.1, math.nan, 100.0])}
    plot_run_curves(curves, title="Total loss", label="loss", axis="minutes")
    plot_run_curves(curves, title="AP", label="AP (%)", axis="minutes", from_zero=True)
    assert [drawn.get_yscale() for drawn in axes] == ["log", "linear"]
    assert axes[1].get_ylim()[0] == 0
    assert axes[0].get_legend() is None


def test_schedules_are_points_and_only_runs_of_one_recipe_are_joined(axes: list[Axes]) -> None:
    scores = {
        "AP": {"long": (40.0, 9.0), "other": (20.0, 7.0), "short": (10.0, 5.0)},
        "AP50": {"long": (40.0, 19.0), "other": (20.0, 6.0)},
    }
    recipes = {"long": "a", "short": "a", "other": ""}
    plot_schedules(scores, label="AP (%)", axis="epochs", recipes=recipes)
    lines = [(line.get_xydata().tolist(), line.get_linestyle()) for line in axes[0].get_lines()]
    assert lines == [
        ([[10, 5], [40, 9]], "-"),
        ([[20, 7]], "None"),
        ([[40, 19]], "None"),
        ([[20, 6]], "None"),
    ]
    # Each run is named once, at its best score, and each score once.
    assert {text.get_text(): text.xy for text in axes[0].texts} == {
        "long": (40.0, 19.0), "other": (20.0, 7.0), "short": (10.0, 5.0)
    }  # fmt: skip
    assert len(axes[0].texts) == 3
    assert [text.get_text() for text in axes[0].get_legend().get_texts()] == ["AP", "AP50"]


def test_runs_without_a_known_recipe_are_alone() -> None:
    assert group_recipes(["a", "b", "c", "d"], {"a": "x", "b": "", "d": "x"}) == [
        ["a", "d"], ["b"], ["c"]
    ]  # fmt: skip


def test_a_run_keeps_its_colour_and_its_name_where_it_is_alone(axes: list[Axes]) -> None:
    line = ([0.0, 1.0], [2.0, 1.0])
    among = ["first", "_second", "third"]
    plot_run_curves(dict.fromkeys(among, line), title="", label="", axis="epochs")
    plot_run_curves({"_second": line}, title="", label="", axis="epochs", among=among)
    together, (alone,) = axes[0].get_lines(), axes[1].get_lines()
    assert alone.get_color() == together[1].get_color() != together[0].get_color()
    assert alone.get_marker() == together[1].get_marker()
    names = [[text.get_text() for text in drawn.get_legend().get_texts()] for drawn in axes]
    assert names == [["first", " _second", "third"], [" _second"]]


@pytest.mark.parametrize(("theme", "page"), [("light", (255, 255, 255)), ("dark", (32, 28, 26))])
def test_charts_of_many_runs_stand_on_the_page_colour(theme: Any, page: tuple[int, ...]) -> None:
    curves = {f"run {index}": ([0.0, 1.0], [index, 2.0 * index]) for index in range(9)}
    chart = plot_run_curves(
        curves, title="Loss", label="loss", axis="images", theme=theme, format="png"
    )
    pixels = cv2.imdecode(np.frombuffer(chart, np.uint8), cv2.IMREAD_COLOR)
    assert tuple(pixels[0, 0]) == page  # BGR
