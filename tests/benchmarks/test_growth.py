# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The benchmark of growth: slopes, what is worse than linear, its picture."""

from xml.etree import ElementTree

import pytest

from benchmarks import growth
from benchmarks.growth import rows_of


def test_a_ratio_below_one_says_that_the_cost_grows_faster_than_in_proportion() -> None:
    rows = rows_of("pixels", {"285m_eager": {1.0: 2.0, 2.0: 4.0, 4.0: 16.0}})
    assert [row.ratio for row in rows] == [1.0, 1.0, 0.5]
    assert [row.peer for row in rows] == [2.0, 4.0, 8.0]
    assert rows[2].name == "growth/pixels/285m_eager/4"


def test_a_quick_run_measures_all_axes_and_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "build", lambda name, form, **_: _Forward())
    monkeypatch.setattr(growth, "load_mf_detr", lambda *_: lambda: None)
    monkeypatch.setattr(growth, "call_detectron2", lambda model, images: images)
    monkeypatch.setattr(growth, "set_threads", lambda threads: None)
    rows = growth.run(quick=True)
    axes = [row.name.split("/")[1] for row in rows]
    assert {axis: axes.count(axis) for axis in axes} == {"pixels": 8, "batch": 8, "queries": 2}
    picture = growth.draw(rows)
    ElementTree.fromstring(picture)
    assert b"DETR-R50, eager: " in picture  # matplotlib's comment beside the glyphs


class _Forward:
    """A forward that holds its model, as ``functools.partial`` does."""

    def __init__(self) -> None:
        self.args = (self,)
        self.backbone = lambda images: images

    def __call__(self, images: object) -> object:
        return images
