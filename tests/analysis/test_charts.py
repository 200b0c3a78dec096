# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Charts: what is read from a run, and that every chart is drawn for both themes."""

import itertools
import math
import re
from pathlib import Path

import cv2
import numpy as np
import pytest

from qbheat_det.analysis import charts
from qbheat_det.analysis.charts import (
    Theme,
    darken,
    encode,
    list_colors,
    list_styles,
    plot_class_ap,
    plot_curve,
    read_metrics,
    select_series,
    start_figure,
    to_text,
    to_texts,
)

METRICS = {"AP": 40.0, "AP50": 60.0, "AP-disc": 70.5, "AP-star": 10.0, "AP-none": math.nan}


def test_metrics_are_read_up_to_a_line_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "metrics.json"
    path.write_text(
        '{"iteration": 19, "total_loss": 2.0}\n'
        '{"iteration": 39, "total_loss": 1.0, "bbox/AP": NaN}\n'
        '{"iteration": 49, "total_loss": 9.0, "note": "\xff"}\n'
        '7\n[1]\n{"iteration": "none", "total_loss": 9.0}\n{"iteration": NaN, "total_loss": 9.0}\n'
        '{"iteration": 59, "tot',
        encoding="latin-1",
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


@pytest.mark.filterwarnings("error")
def test_names_of_people_are_drawn_as_they_are_written(caplog: pytest.LogCaptureFixture) -> None:
    charts._say_once.cache_clear()
    names = ["_first", "$x^$", "US$ and $", r"a\$b", "字", "x" * 150]
    chart = plot_curve([0, 1], {name: [1.0, 2.0] for name in names}, label="in $x^$")
    # In comments beside the shapes of their letters; a formula would have none.
    for drawn in ("_first", "$x^$", "US$ and $", "字", f"{'x' * 20}…{'x' * 19}", "in $x^$"):
        assert re.search(f"<!-- +{re.escape(drawn)} -->", chart.decode())
    assert caplog.messages == ["letters that the font of charts does not have are drawn as boxes"]
    assert plot_class_ap({"AP-$x^$": 1.0, "AP-_b": 2.0})
    assert to_text("a\nb") == "a b"


def test_a_label_longer_than_the_axis_has_several_lines() -> None:
    label = "attention in common, over all blocks and heads (1: the same pixels)"
    drawn = re.findall("<!-- (.*) -->", plot_curve([0, 1], {"a": [1, 2]}, label=label).decode())
    lines = [text for text in drawn if text in label and len(text) > 5]
    assert len(lines) > 1
    assert " ".join(lines) == label


def test_powers_of_ten_stay_formulas() -> None:
    figure, axes = start_figure("light", height=2)
    axes.plot([1, 2], [1e-3, 1e3])
    axes.set_yscale("log")
    drawn = re.findall(rb"<!-- (.*) -->", encode(figure, "light", "svg"))
    assert rb"$\mathdefault{10^{1}}$" in drawn
    assert not any(rb"\$" in text for text in drawn)


# How people without one kind of cones see linear RGB (Machado et al. 2009, complete loss).
_SIGHTS = {
    "all cones": np.eye(3),
    "no red cones": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
                     [-0.003882, -0.048116, 1.051998]],
    "no green cones": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
                       [-0.011820, 0.042940, 0.968881]],
    "no blue cones": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602],
                      [0.004733, 0.691367, 0.303900]],
}  # fmt: skip
_TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def _to_linear(color: str) -> np.ndarray:
    values = np.array([int(color[start : start + 2], 16) for start in (1, 3, 5)]) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def _to_lab(linear: np.ndarray) -> np.ndarray:
    xyz = _TO_XYZ @ np.clip(linear, 0, 1) / [0.95047, 1.0, 1.08883]
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize(("theme", "page"), [("light", "#ffffff"), ("dark", "#1a1c20")])
def test_lines_can_be_told_apart_by_everyone_and_from_the_page(theme: Theme, page: str) -> None:
    colors = list_colors(theme)
    assert len(colors) == 6
    for matrix in _SIGHTS.values():
        seen = [_to_lab(np.array(matrix) @ _to_linear(color)) for color in colors]
        distances = [np.linalg.norm(a - b) for a, b in itertools.combinations(seen, 2)]
        assert min(distances) >= 18
    ground = _TO_XYZ[1] @ _to_linear(page) + 0.05
    for color in colors:
        own = _TO_XYZ[1] @ _to_linear(color) + 0.05
        assert max(own, ground) / min(own, ground) >= 2.95


def test_no_two_of_many_lines_look_alike() -> None:
    styles = [tuple(style.values()) for style in list_styles("light", 24)]
    assert len({style[:2] for style in styles}) == 24
    assert [style[0] for style in styles[:6]] == list_colors("light")


def test_a_darkened_chart_is_the_one_drawn_for_a_dark_page() -> None:
    def bare(chart: bytes) -> bytes:  # names of shapes are drawn at random, and there is a date
        chart = re.sub(rb'(id="|href="#|url\(#)[^")]*', b"", chart)
        return re.sub(rb"<dc:date>.*?</dc:date>", b"", chart)

    lines = {f"run {index}": [1.0 + index, 2.0] for index in range(6)}
    light, dark = (
        plot_curve([0, 1], lines, label="AP", levels={"random": 1.5}, theme=theme)
        for theme in ("light", "dark")
    )
    assert bare(light) != bare(dark)
    assert bare(darken(light)) == bare(dark)


def test_a_chart_is_the_same_bytes_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    first = plot_curve([1, 2], {"loss": [2.0, 1.0]}, label="loss")
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "0")  # another day
    assert plot_curve([1, 2], {"loss": [2.0, 1.0]}, label="loss") == first


def test_names_that_differ_in_the_middle_stay_apart() -> None:
    names = [f"{'a' * 30}{letter}{'b' * 30}" for letter in "xyx"]
    texts = to_texts(names, longest=20)
    assert texts[0] == texts[2] != texts[1]
    assert len(texts[0]) < 61 + 1
    ends = to_texts(["a" * 30 + "_left", "a" * 30 + "_right"], longest=20)
    assert [len(text) for text in ends] == [20, 20]  # apart already
    assert to_texts([]) == []
