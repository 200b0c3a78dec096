# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Means and spreads by hand arithmetic, tables and pictures of whatever is done."""

import math
from typing import Any

import pytest

from qbheat_det.analysis.comparison_chart import plot_comparison
from qbheat_det.analysis.comparison_summary import (
    collect,
    list_measures,
    summarise,
    summarise_all,
)
from qbheat_det.analysis.comparison_table import render_comparison, render_table

ABOUT: dict[str, Any] = {
    "train_images": 4000,
    "val_images": 100,
    "classes": 5,
    "pretraining_images": 4000,
    "seeds": [1, 2],
    "epochs": 6.0,
    "stages": 12,
    "done": 7,
    "failed": 0,
    "hardware": {"cpu": "a processor", "cores": 2, "accelerator": "no GPU"},
}


def result(objective: str, seed: int, stage: str, **figures: Any) -> dict[str, Any]:
    return {"objective": objective, "seed": seed, "stage": stage, "figures": figures}


def probed(top1: float) -> dict[str, Any]:
    return {"top1": top1, "num_images": 100, "probe": "knn"}


RESULTS = [
    result("random", 1, "backbone", madds_of_training=None, recalibrated_images=32),
    result("random", 1, "probes", knn=probed(10.0), setting={"k": 20}),
    result("random", 2, "probes", knn=probed(12.0)),
    result("random", 1, "probes_as_stored", knn=probed(4.0)),
    result("qb_heat", 1, "pretraining", images_seen=24000, seconds=600.0, seconds_per_image=0.02),
    result("qb_heat", 1, "backbone", madds_of_training=4.1e7, recalibrated_images=32),
    result("qb_heat", 1, "probes", **{"knn": probed(20.0), "tran-1": probed(36.0)}),
    result("qb_heat", 1, "retinanet", AP=1.5, AP50=4.5),
]


def test_mean_deviation_and_standard_error_are_those_by_hand() -> None:
    spread = summarise({1: 10.0, 2: 14.0}, num_images=100)
    assert spread.mean == 12.0
    assert spread.deviation == pytest.approx(math.sqrt(8))  # ((-2)^2 + 2^2) / (2 - 1)
    assert spread.standard_error == pytest.approx(100 * math.sqrt(0.12 * 0.88 / 100))
    assert spread.to_dict()["values"] == {1: 10.0, 2: 14.0}


def test_one_seed_has_no_deviation_and_no_share_no_standard_error() -> None:
    content = summarise({1: 1.5}).to_dict()
    assert content == {"mean": 1.5, "deviation": None, "values": {1: 1.5}, "standard_error": None}


def test_measures_are_those_that_results_hold_in_the_order_of_the_table() -> None:
    assert list_measures(RESULTS) == {
        "probes/knn": "kNN",
        "probes/tran-1": "tran-1",
        "probes_as_stored/knn": "kNN",
        "retinanet/AP": "RetinaNet AP",
        "retinanet/AP50": "RetinaNet AP50",
    }
    assert list_measures([]) == {}


def test_a_measure_is_collected_over_the_seeds_that_have_it() -> None:
    spread = collect(RESULTS, "random", "probes/knn")
    assert spread is not None
    assert spread.values == {1: 10.0, 2: 12.0}
    assert collect(RESULTS, "random", "probes/tran-1") is None
    assert collect(RESULTS, "random", "retinanet/AP") is None


def test_figures_that_are_not_finite_do_not_count() -> None:
    nothing = [result("a", 1, "retinanet", AP=math.nan, AP50=1.0)]
    assert collect(nothing, "a", "retinanet/AP") is None


def test_the_summary_has_what_training_cost() -> None:
    summary = summarise_all(RESULTS, ["random", "qb_heat"])
    assert summary["qb_heat"]["pretraining/images_seen"].mean == 24000
    assert "backbone/madds_of_training" not in summary["random"]
    assert "pretraining/seconds" not in summary["random"]


def test_the_tables_say_every_figure_with_its_spread() -> None:
    text = render_comparison(RESULTS, ["random", "qb_heat"], ABOUT)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    assert ["random", "11.00 ± 1.41 (2)", "-", "-", "-"] in rows
    one = "(one seed)"
    assert ["qb_heat", f"20.00 {one}", f"36.00 {one}", f"1.50 {one}", f"4.50 {one}"] in rows
    assert ["random", f"4.00 {one}"] in rows
    assert ["qb_heat", "24,000", "41 M", "20.0 ms", "10.0 min"] in rows
    assert ["random", "-", "-", "-", "-"] in rows
    assert "on 32 whole training images" in text
    assert "7 of 12 stages done." in text
    # Binomial at 11, 20 and 36 of 100, and at 4.
    assert "over the 100 images is 1.96 to 4.80 points" in text
    assert "nan" not in text


def test_a_comparison_of_which_nothing_is_done_has_a_table_and_no_picture() -> None:
    text = render_comparison([], ["random"], {**ABOUT, "done": 0, "failed": 1})
    assert "0 of 12 stages done, 1 failed." in text
    assert plot_comparison([], ["random"]) is None


@pytest.mark.parametrize(("format", "magic"), [("svg", b"<?xml"), ("png", b"\x89PNG")])
def test_the_picture_is_drawn_from_what_there_is(format: Any, magic: bytes) -> None:
    picture = plot_comparison(RESULTS, ["random", "mask_token", "qb_heat"], format=format)
    assert picture is not None
    assert picture.startswith(magic)


def test_the_picture_names_rows_and_measures() -> None:
    picture = plot_comparison(RESULTS, ["random", "qb_heat"], theme="dark")
    assert picture is not None
    for word in (b"qb_heat", b"RetinaNet AP50"):
        assert word in picture  # as a comment beside the paths of its letters


def test_columns_of_a_table_line_up() -> None:
    assert render_table(("a", "bb"), [("ccc", "d")]).splitlines() == [
        "| a   | bb |",
        "| --- | -- |",
        "| ccc | d  |",
    ]
