# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The benchmark of growth: slopes, what is worse than linear, its picture."""

from xml.etree import ElementTree

import pytest

from benchmarks import growth


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
