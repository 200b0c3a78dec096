# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Sheets of class activation and steady heat, and the charts of heat and of correlation."""

import re

import numpy as np

from qbheat_det.analysis.charts import INK
from qbheat_det.analysis.correlation_chart import plot_correlations
from qbheat_det.analysis.heat_pictures import (
    LABELS,
    draw_heat_sheet,
    lay_over,
    paint,
    plot_agreements,
)
from qbheat_det.analysis.steady_heat import study_map

SIDE, GAP = 160, 6


def test_colours_go_from_dark_to_bright_between_the_ends_and_no_further() -> None:
    values = np.linspace(-1, 2, 31)[None]
    brightness = paint(values, 0.0, 1.0).astype(int).sum(axis=2)[0]
    assert (np.diff(brightness[10:21]) > 0).all()
    np.testing.assert_array_equal(brightness[:11], brightness[0])
    np.testing.assert_array_equal(brightness[20:], brightness[-1])
    assert paint(np.zeros((2, 3)), 0.0, 0.0).shape == (2, 3, 3)  # a constant map has a colour too


def test_a_map_lies_over_its_image_the_right_way_up() -> None:
    corner = np.zeros((4, 4))
    corner[0, 3] = 1.0
    over = lay_over(np.full((40, 40, 3), 90, dtype=np.uint8), corner, 0.0, 1.0).astype(int)
    brightness = over.sum(axis=2)
    assert np.unravel_index(brightness.argmax(), (40, 40))[0] < 10
    assert np.unravel_index(brightness.argmax(), (40, 40))[1] >= 30


def test_a_sheet_holds_the_map_the_steady_heat_and_that_with_a_source() -> None:
    values = np.random.default_rng(0).normal(size=(5, 5))
    study = study_map(values)
    image = np.full((SIDE, SIDE, 3), 70, dtype=np.uint8)
    sheet = draw_heat_sheet([image], [values], [study], ["dog 0.93"])
    assert sheet.shape[1] == 7 * (SIDE + GAP) - GAP
    top = next(i for i, row in enumerate(sheet) if (row[SIDE + GAP : 2 * SIDE] == 70).all())
    rows = slice(top + 16, top + SIDE, 32)  # the middles of five positions
    for column, drawn in ((3, values), (4, study.steady), (5, study.with_source)):
        left = column * (SIDE + GAP)
        found = sheet[rows, left + 16 : left + SIDE : 32]
        np.testing.assert_array_equal(found, paint(drawn, values.min(), values.max()))


def test_charts_name_axes_subjects_and_means_in_light_and_dark() -> None:
    values = {"trained": [0.2, 0.4], "random": [0.7, 0.8, 0.9]}
    one = study_map(np.random.default_rng(1).normal(size=(6, 6))).agreements
    kinds = {kind: [one[kind].to_dict()] * 3 for kind in LABELS}
    for theme in ("light", "dark"):
        histogram = plot_correlations(values, "s16", controls=["random"], theme=theme).decode()
        for text in ("trained: mean 0.300, 2 images", "random: mean 0.800, 3 images",
                     "Spatial correlation of the map s16", "images (%)"):  # fmt: skip
            assert f"<!-- {text} -->" in histogram
        chart = plot_agreements({"a": kinds, "b": kinds}, theme=theme).decode()
        for text in ("a", "b", *LABELS.values(), "CAM and what is made of its border"):
            assert f"<!-- {text} -->" in chart
        for svg, title in (
            (histogram, "Spatial correlation of the map s16"),
            (chart, "CAM and what is made of its border"),
        ):  # matplotlib's own colour of a title on the left would be black on a dark page
            assert re.search(f'<!-- {title} -->\\s*<g style="fill: {INK[theme]}"', svg)
    same = plot_correlations({"a": [0.5]})  # one image, one bin
    assert b"0.500" in same
