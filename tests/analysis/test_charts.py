# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Charts: what is read from a run, and that every chart is drawn for both themes."""

import math
from pathlib import Path

import cv2
import numpy as np
import pytest

from qbheat_det.analysis.charts import plot_class_ap, plot_curve, read_metrics, select_series

METRICS = {"AP": 40.0, "AP50": 60.0, "AP-disc": 70.5, "AP-star": 10.0, "AP-none": math.nan}


def test_metrics_are_read_up_to_a_line_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "metrics.json"
    path.write_text(
        '{"iteration": 19, "total_loss": 2.0}\n'
        '{"iteration": 39, "total_loss": 1.0, "bbox/AP": NaN}\n'
        '{"iteration": 59, "tot'
    )
    records = read_metrics(path)
    assert select_series(records, ["total_loss"]) == ([19, 39], {"total_loss": [2.0, 1.0]})
    iterations, values = select_series(records, ["bbox/AP", "total_loss"])
    assert iterations == [39]
    assert math.isnan(values["bbox/AP"][0])


@pytest.mark.parametrize(("theme", "page"), [("light", (255, 255, 255)), ("dark", (32, 28, 26))])
def test_charts_stand_on_the_page_colour_of_their_theme(theme: str, page: tuple[int, ...]) -> None:
    charts = [
        plot_class_ap(METRICS, theme=theme, format="png"),
        plot_curve([1, 2, 3], {"AP": [1.0, math.nan, 3.0]}, label="%", theme=theme, format="png"),
    ]
    for chart in charts:
        pixels = cv2.imdecode(np.frombuffer(chart, np.uint8), cv2.IMREAD_COLOR)
        assert tuple(pixels[0, 0]) == page  # BGR
        assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 10


def test_the_longest_bar_is_the_best_class() -> None:
    chart = plot_class_ap({"AP-a": 25.0, "AP-b": 100.0, "AP-c": math.nan}, format="png")
    pixels = cv2.imdecode(np.frombuffer(chart, np.uint8), cv2.IMREAD_COLOR).astype(int)
    bar = (np.abs(pixels - (235, 111, 31)).sum(2) < 10).sum(1)  # the accent, BGR
    rows = np.flatnonzero(bar)
    assert bar[rows[0]] == pytest.approx(4 * bar[rows[-1]], rel=0.03)


def test_svg_is_the_default() -> None:
    assert b"<svg" in plot_class_ap(METRICS)
    assert b"<svg" in plot_curve([1, 2], {"loss": [2.0, 1.0]}, label="loss")


def test_levels_are_named_and_change_the_picture() -> None:
    lines = {"QB-Heat": [1.0, 2.0]}
    chart = plot_curve([0, 1], lines, label="AP", x_label="images seen", levels={"random": 1.5})
    assert chart != plot_curve([0, 1], lines, label="AP", x_label="images seen")
    # Matplotlib draws text as paths, and names them in comments.
    assert b"<!-- random -->" in chart
    assert b"<!-- images seen -->" in chart
