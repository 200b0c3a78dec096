# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Probes against images seen: a line each, random backbones as levels of the same colour."""

from typing import Any

import pytest

from qbheat_det.analysis.probe_charts import plot_probes


def make_rows() -> list[dict[str, Any]]:
    return [
        {
            "images_seen": seen,
            "recalibrated": recalibrated,
            "probe": probe,
            "top1": 10.0 + recalibrated,
            "top1_standard_error": 1.0,
        }
        for seen in (0, 0, 64, 128, None)
        for recalibrated in (0, 8)
        for probe in ("knn", "tran-1")
    ]


def texts(svg: bytes) -> str:
    """matplotlib writes each text as a comment beside its outlines."""
    return svg.decode()


def test_each_probe_and_its_mean_over_random_backbones_is_named() -> None:
    svg = texts(plot_probes(make_rows()))
    for name in ("knn", "tran-1", "knn, random (mean of 2)", "tran-1, random (mean of 2)"):
        assert f"<!-- {name} -->" in svg
    assert "<!-- knn, random as initialised (mean of 2) -->" in svg
    assert "images seen in pre-training" in svg


def test_random_backbones_without_new_statistics_are_one_level() -> None:
    svg = texts(plot_probes([row for row in make_rows() if not row["recalibrated"]]))
    assert "<!-- knn, random (mean of 2) -->" in svg
    assert "as initialised" not in svg


@pytest.mark.parametrize("kept", [lambda r: r["images_seen"] == 0, lambda r: r["images_seen"]])
def test_either_kind_alone_can_be_drawn(kept: Any) -> None:
    svg = texts(plot_probes([row for row in make_rows() if kept(row)], theme="dark"))
    assert "<!-- knn" in svg


def test_png_is_drawn_too_and_nothing_gives_an_empty_chart() -> None:
    assert plot_probes(make_rows(), format="png").startswith(b"\x89PNG")
    assert b"<svg" in plot_probes([])
