# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Accuracies of probes as points: the right backbones, means by hand, lines where they belong."""

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from qbheat_det.analysis import probe_comparison_charts
from qbheat_det.analysis.probe_comparison_charts import plot_by_decoder, plot_by_images
from qbheat_det.analysis.probe_results import (
    Decoder,
    Point,
    ProbeResult,
    choose_statistics,
    list_decoders,
    place_by_decoder,
    place_by_images,
)

KNN, LINEAR = Decoder(0, 0, 0, "kNN"), Decoder(1, 0, 0, "linear")
NARROW, WIDE = (Decoder(2, 1, width, "tran-1") for width in (192, 768))
DEEP = Decoder(2, 4, 192, "tran-4")


def make_result(
    series: str = "run",
    seen: int | None = 64,
    decoder: Decoder = KNN,
    top1: float = 10.0,
    *,
    error: float = 1.0,
    recalibrated: bool = False,
) -> ProbeResult:
    return ProbeResult(series, f"{series}.pth", seen, recalibrated, decoder, top1, error)


def test_decoders_are_in_the_order_of_their_power_and_name_their_width() -> None:
    results = [make_result(decoder=one) for one in (DEEP, WIDE, KNN, NARROW, LINEAR, KNN)]
    found = list_decoders(results)
    assert found == [KNN, LINEAR, NARROW, WIDE, DEEP]
    assert [one.title for one in found] == [
        "kNN", "linear", "tran-1, width 192", "tran-1, width 768", "tran-4, width 192"
    ]  # fmt: skip


def test_seeds_are_averaged_and_of_a_run_the_last_checkpoint_stands_under_decoders() -> None:
    results = [
        make_result(seen=64, top1=99.0),
        make_result(seen=128, top1=10.0, error=1.0),
        make_result(seen=128, top1=20.0, error=2.0),
        make_result("untold", None, LINEAR, 30.0),
    ]
    assert place_by_decoder(results) == {
        "run": {KNN: Point(15.0, 1.5, 2)},
        "untold": {LINEAR: Point(30.0, 1.0, 1)},
    }
    assert place_by_images(results, KNN) == {
        "run": {64: Point(99.0, 1.0, 1), 128: Point(15.0, 1.5, 2)}
    }
    assert place_by_images(results, LINEAR) == {}  # it does not tell


def test_statistics_are_those_of_whole_images_and_random_backbones_keep_both() -> None:
    stored = [make_result(), make_result("random", 0), make_result("other")]
    anew = [make_result(recalibrated=True), make_result("random", 0, recalibrated=True)]
    chosen = choose_statistics([*stored, *anew])
    assert [(result.series, result.recalibrated) for result in chosen] == [
        ("random, as initialised", False), ("other", False), ("run", True), ("random", True)
    ]  # fmt: skip


@pytest.fixture
def axes(monkeypatch: pytest.MonkeyPatch) -> list[Axes]:
    """The axes themselves, instead of files of them."""
    drawn: list[Axes] = []

    def keep(figure: Figure, *args: object) -> bytes:
        drawn.extend(figure.axes)
        return b""

    monkeypatch.setattr(probe_comparison_charts, "encode", keep)
    return drawn


def test_lines_join_the_widths_of_one_decoder_alone(axes: list[Axes]) -> None:
    heights = {KNN: 5.0, LINEAR: 10.0, NARROW: 20.0, WIDE: 40.0, DEEP: 30.0}
    points = {"one": {decoder: Point(top1, 2.0, 1) for decoder, top1 in heights.items()}}
    plot_by_decoder(points | {"_other": {LINEAR: Point(11.0, 1.0, 1)}})
    (chart,) = axes
    assert [label.get_text() for label in chart.get_xticklabels()] == [
        "kNN", "linear", "tran-1\n192", "tran-1\n768", "tran-4\n192"
    ]  # fmt: skip
    lines = [container[0] for container in chart.containers]
    assert [list(line.get_ydata()) for line in lines] == [[5], [10], [20, 40], [30], [11]]
    places = [float(x) for line in lines for x in line.get_xdata()]
    np.testing.assert_allclose(places, [-0.125, 0.875, 1.875, 2.875, 3.875, 1.125])
    # Bars of one standard error: from 18 to 22.
    (segment, _) = chart.containers[2][2][0].get_segments()
    assert [y for _, y in segment] == [18, 22]
    assert chart.get_ylim() == pytest.approx((0, 1.08 * 42))  # bars of errors have room
    names = [text.get_text() for text in chart.figure.legends[0].get_texts()]
    assert names == ["one", " _other"]  # an underscore would hide it


def test_checkpoints_are_joined_and_random_backbones_are_levels(axes: list[Axes]) -> None:
    points = {
        "long": {64: Point(10.0, 1.0, 1), 128: Point(20.0, 1.0, 1)},
        "short": {32: Point(9.0, 1.0, 1)},
        "random": {0: Point(5.0, 1.0, 2)},
    }
    plot_by_images(points, title="linear", series=["absent", *points])
    chart = axes[0]
    lines = [container[0] for container in chart.containers]
    assert [list(line.get_xdata()) for line in lines] == [[64, 128], [32]]
    level = chart.get_lines()[-1]
    assert (level.get_label(), np.asarray(level.get_ydata()).tolist()) == ("random", [5.0, 5.0])
    assert chart.get_title(loc="left") == "Top-1 by linear"
    assert chart.get_xlim()[0] == 0
    # A series keeps its colour where another is not there.
    plot_by_images({"short": points["short"]}, title="kNN", series=["absent", *points])
    assert axes[1].containers[0][0].get_color() == lines[1].get_color() != lines[0].get_color()
