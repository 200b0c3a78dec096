# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Sheets of reconstructions: every pixel from where it should be."""

import numpy as np
import pytest

from qbheat_det.analysis.reconstruction_pictures import complete, draw_sheet, show_visible


def test_what_is_masked_is_grey_and_what_is_visible_is_the_image() -> None:
    image = np.random.default_rng(0).integers(0, 255, (4, 4, 3)).astype(np.uint8)
    visible = np.zeros((4, 4), dtype=bool)
    visible[:2, 2:] = True
    shown = show_visible(image, visible)
    np.testing.assert_array_equal(shown[:2, 2:], image[:2, 2:])
    np.testing.assert_array_equal(shown[~visible], 128)
    made = np.full((4, 4, 3), [-30.0, 99.6, 300.0], dtype=np.float32)
    completed = complete(image, visible, made)
    np.testing.assert_array_equal(completed[:2, 2:], image[:2, 2:])
    np.testing.assert_array_equal(completed[~visible], np.full((12, 3), [0, 100, 255]))


def test_a_sheet_has_a_row_for_each_image_and_a_column_for_each_title() -> None:
    def paint(value: int) -> np.ndarray:
        return np.full((50, 50, 3), value, dtype=np.uint8)

    sheet = draw_sheet(
        {"input": [paint(10), paint(20)], "visible": [paint(30), paint(40)]}, note="a note",
        min_side=100,
    )  # fmt: skip
    # Twice enlarged, with six pixels between; the letters are in strips above and below.
    assert sheet.shape[1] == 2 * 100 + 6
    strips = sheet.shape[0] - (2 * 100 + 6)
    top = strips // 2
    for row, values in enumerate([(10, 30), (20, 40)]):
        for column, value in enumerate(values):
            y, x = top + 106 * row, 106 * column
            np.testing.assert_array_equal(sheet[y : y + 100, x : x + 100], value)
    assert len(np.unique(sheet[:top])) > 2  # letters
    with pytest.raises(ValueError, match="equally many"):
        draw_sheet({"a": [paint(1)], "b": []})


def test_names_stand_in_a_column_of_their_own_and_fit_it() -> None:
    pictures = [np.full((50, 50, 3), value, dtype=np.uint8) for value in (10, 20)]
    plain = draw_sheet({"input": pictures}, min_side=100)
    named = draw_sheet(
        {"input": pictures}, names=["short", "a/long name/of-an-unbroken-checkpoint"], min_side=100
    )
    assert named.shape == (plain.shape[0], 2 * 100 + 6, 3)
    top = named.shape[0] - 206
    np.testing.assert_array_equal(named[top:, 106:], plain[top:])
    for row in range(2):
        cell = named[top + 106 * row : top + 106 * row + 100, :100]
        background = cell[0, 0]
        assert (cell != background).any()
        for edge in (cell[:, 0], cell[:, -1], cell[0], cell[-1]):
            np.testing.assert_array_equal(edge, np.broadcast_to(background, edge.shape))
    with pytest.raises(ValueError, match="1 names do not go with 2 rows"):
        draw_sheet({"input": pictures}, names=["alone"])
