# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Figures as files, the theme of charts, and grids of images pixel by pixel."""

import io
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image as PILImage

from qbheat_det.analysis import load_figures
from qbheat_det.analysis.plotting import (
    COLORS,
    add_legend,
    chart_image,
    color_map,
    enlarge,
    list_styles,
    overlay_map,
    plot_grid,
    shrink,
    start_chart,
    themed,
    to_rgb,
    to_text,
    to_texts,
)
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
        {"energy": torch.tensor([1.5, 2.0]), "rank": np.int64(3), "error": math.nan},
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
        "data": {"energy": [1.5, 2.0], "rank": 3, "error": None},
        "files": names,
        "table": {"header": ["run", "rank"], "rows": [["a", "3"]]},
    }
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError):
        write_figure(make_figure(), tmp_path / "file")


def test_stale_images_are_removed_and_no_other_file(tmp_path: Path) -> None:
    write_figure(make_figure("a", "b"), tmp_path)
    others = {"spectrum_mine.png", "notes.txt", "curves.json"}
    for name in others:
        (tmp_path / name).write_text("{}")
    write_figure(make_figure("c"), tmp_path)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"spectrum.json", "spectrum_c.png"} | others
    # A JSON that was edited removes nothing but images of that figure.
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "a.png").write_text("")
    named = ["spectrum_c.png", "notes.txt", "../a.png", "spectrum_/../inner/a.png", 3]
    (tmp_path / "spectrum.json").write_text(json.dumps({"name": "spectrum", "files": named}))
    for name in ("curves", "none", "../spectrum", "spectrum"):
        remove_figure(name, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == others | {"inner"}
    assert (tmp_path / "inner" / "a.png").exists()


def test_nested_values_become_json() -> None:
    values = {
        1: (np.float32(0.5), np.array([[1, 2]]), torch.tensor(True)),
        "complex": 1 + 2j,
        "eigenvalues": np.array([1j, -math.inf]),
        "path": Path("a/b"),
    }
    assert to_json(values) == {
        "1": [0.5, [[1, 2]], True],
        "complex": [1.0, 2.0],
        "eigenvalues": [[0.0, 1.0], [None, 0.0]],
        "path": "a/b",
    }
    with pytest.raises(TypeError, match="object"):
        to_json({"what": [object()]})


def test_all_figures_are_registered() -> None:
    names = {"attention", "beyond", "correlation", "heat", "queries", "reconstructions", "spectrum"}
    assert names <= set(load_figures())
    assert set(TRAINING_FIGURES) == {"correlation", "reconstructions", "spectrum"}


@themed
def draw_chart(names: list[str]) -> Image:
    figure, axes = start_chart(height=2)
    for name in names:
        axes.plot([1, 2], [1, 2], label=to_text(name))
    axes.set_yscale("log")
    add_legend(figure, axes)
    return chart_image(figure, caption="a chart")


def test_a_chart_is_the_same_bytes_each_time_and_names_are_drawn_as_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ["_first", "$x^$", "US$", "x" * 150]
    image = draw_chart(names)
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "0")  # another day
    assert draw_chart(names).content == image.content
    assert (image.media_type, image.alt) == ("image/svg+xml", "a chart")
    # matplotlib draws text as paths, and has it in comments; a formula would have none.
    for drawn in ("_first", "$x^$", "US$", f"{'x' * 20}…{'x' * 19}", r"$\mathdefault{10^{0}}$"):
        assert re.search(f"<!-- +{re.escape(drawn)} -->", image.content.decode())
    assert to_text("a\nb") == "a b"
    assert (
        to_texts(["a" * 30 + "_left", "a" * 30 + "_right"], longest=20)[0]
        == "a" * 10 + "…aaaa_left"
    )
    assert len(set(to_texts([f"{'a' * 30}{x}{'b' * 30}" for x in "xy"], longest=20))) == 2


def test_the_first_24_lines_differ() -> None:
    styles = [(style["color"], style["linestyle"]) for style in list_styles(24)]
    assert len(set(styles)) == 24
    assert [color for color, _ in styles[:6]] == list(COLORS)


def test_a_grid_holds_every_pixel_of_its_images() -> None:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (3, 40, 50, 3)).astype(np.uint8)
    chart = plot_grid([[images[0], images[1]], [images[2]]], column_names=["a", "b"],
                      row_names=["x", "y"], note="a note")  # fmt: skip
    content = chart_image(chart, format="jpg").content
    with PILImage.open(io.BytesIO(content)) as encoded:
        assert encoded.size[0] > 104
        assert encoded.size[1] > 84
    (drawn,) = chart.axes[0].get_images()
    mosaic = np.asarray(drawn.get_array())
    assert mosaic.shape == (2 * 44 - 4, 2 * 54 - 4, 3)
    for image, (top, left) in zip(images, ((0, 0), (0, 54), (44, 0)), strict=True):
        np.testing.assert_array_equal(mosaic[top : top + 40, left : left + 50], image)
    assert (mosaic[44:, 54:] == 255).all()


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


def test_images_are_resized_without_changing_their_colours() -> None:
    image = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    np.testing.assert_array_equal(enlarge(image, 5)[::3, ::3], image)
    assert enlarge(image, 5, exact=True).shape == (5, 5, 3)
    assert shrink(image, 2).shape == (1, 2, 3)
    assert color_map([[0.0, 2.0]], 0, 1, "inferno").tolist()[0] == [[0, 0, 3], [252, 254, 164]]
    tensor = torch.arange(3).view(3, 1, 1)
    assert to_rgb(tensor, "BGR").tolist() == [[[2.0, 1.0, 0.0]]]
