# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The benchmark of growth: slopes, what is worse than linear, its picture."""

from xml.etree import ElementTree

import pytest

from benchmarks import growth
from benchmarks.growth import curves_of, rows_of
from benchmarks.growth_chart import slope


def test_the_slope_is_the_power_of_the_growth() -> None:
    assert slope({x: 3 * x**2 for x in (1.0, 2.0, 5.0)}) == pytest.approx(2.0)
    assert slope({320.0: 4.0, 640.0: 4.0}) == pytest.approx(0.0)


def test_a_ratio_below_one_says_that_the_cost_grows_faster_than_in_proportion() -> None:
    rows = rows_of("pixels", {"285m_eager": {1.0: 2.0, 2.0: 4.0, 4.0: 16.0}})
    assert [row.ratio for row in rows] == [1.0, 1.0, 0.5]
    assert [row.peer for row in rows] == [2.0, 4.0, 8.0]
    assert rows[2].name == "growth/pixels/285m_eager/4"


def test_two_processes_that_train_less_than_twice_as_fast_have_a_ratio_below_one() -> None:
    rows = rows_of("processes", {"285m_211_training": {1.0: 2.0, 2.0: 3.0}})
    assert rows[1].ratio == 0.75


def test_the_picture_is_drawn_from_the_rows_alone_and_names_the_slopes() -> None:
    panels = {
        "pixels": {"285m_211_eager": {0.1: 1.0, 0.4: 4.0}, "detr_r50_eager": {0.1: 2.0, 0.4: 32.0}},
        "queries": {"285m_211_eager": {100.0: 1.0, 300.0: 1.1}},
        "processes": {"285m_211_training": {1.0: 2.0, 2.0: 3.6}},
    }
    rows = [row for axis, curves in panels.items() for row in rows_of(axis, curves)]
    assert curves_of(rows) == panels
    picture = growth.draw(rows)
    ElementTree.fromstring(picture)
    for text in (
        b"285M + 211, eager: 1.00",
        b"DETR-R50, eager: 2.00",
        b"training, 285M + 211: 0.85",
    ):
        assert text in picture  # matplotlib's comment beside the glyphs


def test_a_quick_run_measures_all_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "build", lambda name, form, **_: _Forward())
    monkeypatch.setattr(growth, "load_mf_detr", lambda *_: lambda: None)
    monkeypatch.setattr(growth, "call_detectron2", lambda model, images: images)
    monkeypatch.setattr(growth, "images_per_second", lambda n, **_: float(n))
    monkeypatch.setattr(growth, "set_threads", lambda threads: None)
    axes = curves_of(growth.run(quick=True))
    assert {axis: len(curves) for axis, curves in axes.items()} == {
        "pixels": 4,
        "batch": 4,
        "queries": 1,
        "processes": 1,
    }
    assert all(len(points) == 2 for curves in axes.values() for points in curves.values())


class _Forward:
    """A forward that holds its model, as ``functools.partial`` does."""

    def __init__(self) -> None:
        self.args = (self,)
        self.backbone = lambda images: images

    def __call__(self, images: object) -> object:
        return images
