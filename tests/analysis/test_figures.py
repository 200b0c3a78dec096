# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Figures as files, the theme of charts, and grids of images pixel by pixel."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from qbheat_det.analysis import load_figures
from qbheat_det.analysis.plotting import overlay_map
from qbheat_det.core.errors import UserError
from qbheat_det.core.figures import (
    TRAINING_FIGURES,
    Figure,
    Image,
    Table,
    remove_figure,
    to_json,
    write_figure,
)


def make_figure(*images: str) -> Figure:
    return Figure(
        "spectrum",
        "Spectrum",
        ["What it shows."],
        {name: Image(name.encode(), "image/png", name) for name in images},
        {
            "energy": torch.tensor([1.5, 2.0]),
            "rank": np.int64(3),
            "error": math.nan,
            "eigenvalues": np.array([1j, -math.inf]),
            "path": Path("a/b"),
            1: 1 + 2j,
        },
        Table(("run", "rank"), [("a", "3")]),
    )


def test_a_figure_is_strict_json_and_its_images(tmp_path: Path) -> None:
    about, *images = write_figure(make_figure("a", "b_1"), tmp_path / "new", suffix="_007")
    names = ["spectrum_a_007.png", "spectrum_b_1_007.png"]
    assert {path.name: path.read_bytes() for path in images} == dict(
        zip(names, (b"a", b"b_1"), strict=True)
    )
    assert about.name == "spectrum_007.json"
    assert json.loads(about.read_text(), parse_constant=pytest.fail) == {
        "name": "spectrum",
        "title": "Spectrum",
        "explanation": ["What it shows."],
        "data": {
            "energy": [1.5, 2.0],
            "rank": 3,
            "error": None,
            "1": [1.0, 2.0],
            "eigenvalues": [[0.0, 1.0], [None, 0.0]],
            "path": "a/b",
        },
        "files": names,
        "table": {"header": ["run", "rank"], "rows": [["a", "3"]]},
    }
    with pytest.raises(TypeError, match="object"):
        to_json({"what": [object()]})
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError):
        write_figure(make_figure(), tmp_path / "file")


def test_stale_images_are_removed_and_no_other_file(tmp_path: Path) -> None:
    write_figure(make_figure("a", "b"), tmp_path)
    others = {"spectrum_mine.png", "notes.txt", "curves.json", "inner.png"}
    for name in others:
        (tmp_path / name).write_text("{}")
    write_figure(make_figure("c"), tmp_path)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"spectrum.json", "spectrum_c.png"} | others
    # A JSON that was edited removes nothing but images of that figure.
    named = ["spectrum_c.png", "notes.txt", "../a.png", "spectrum_/../inner.png", 3]
    (tmp_path / "spectrum.json").write_text(json.dumps({"name": "spectrum", "files": named}))
    for name in ("curves", "none", "../spectrum", "spectrum"):
        remove_figure(name, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == others


def test_all_figures_are_registered() -> None:
    names = {"attention", "beyond", "correlation", "heat", "queries", "reconstructions", "spectrum"}
    assert names <= set(load_figures())
    assert set(TRAINING_FIGURES) == {"correlation", "reconstructions", "spectrum"}


def test_an_overlay_is_brightest_at_the_peak_of_the_map_in_the_image_s_frame() -> None:
    grey = np.full((24, 40, 3), 128, dtype=np.uint8)
    values = np.zeros((4, 6))  # reaches beyond the image, which is padded to multiples of 8
    values[1, 3] = 1.0
    brightness = overlay_map(grey, values, stride=8, high=1.0).astype(int).sum(axis=2)
    rows, columns = np.nonzero(brightness == brightness.max())
    assert ({*rows}, {*columns}) == ({11, 12}, {27, 28})  # the centre of position (1, 3)
    # viridis begins at (68, 1, 84), and values beyond its ends have the colours of the ends.
    dark = overlay_map(grey, -np.ones((3, 5)), stride=8, high=1.0)[0, 0]
    np.testing.assert_allclose(dark, 0.65 * np.array([68, 1, 84]) + 0.35 * 128, atol=1.01)
