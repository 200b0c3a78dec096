# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Figures as files, and drawn boxes and overlays pixel by pixel."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from detectron2.structures import BitMasks, Boxes, Instances

from qbheat_det.analysis.detections import draw_classes
from qbheat_det.analysis.figures import (
    Figure,
    Image,
    NotApplicable,
    Table,
    remove_figure,
    to_json,
    write_figure,
)
from qbheat_det.analysis.plotting import crop_box, overlay_map, plot_confusion
from qbheat_det.analysis.run import FigureOptions, Run
from qbheat_det.core.errors import UserError
from qbheat_det.evaluation import ClassificationEvaluator
from qbheat_det.inference.drawing import draw_boxes, draw_instances, get_class_color


def make_figure(*images):
    return Figure(
        "spectrum",
        "Spectrum",
        ["What it shows."],
        {name: Image(name.encode(), "image/jpeg", name) for name in images},
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


def test_a_figure_is_strict_json_and_its_images(tmp_path):
    about, *images = write_figure(make_figure("a", "b_1"), tmp_path / "new")
    names = ["spectrum_a.jpg", "spectrum_b_1.jpg"]
    assert {path.name: path.read_bytes() for path in images} == dict(
        zip(names, (b"a", b"b_1"), strict=True)
    )
    assert about.name == "spectrum.json"
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


def test_stale_images_are_removed_and_no_other_file(tmp_path):
    write_figure(make_figure("a", "b"), tmp_path)
    others = {"spectrum_mine.jpg", "notes.txt", "curves.json", "inner.jpg", "mine.json"}
    other = {"name": "spectrum", "files": ["spectrum_mine.jpg"]}  # of another name than its file
    for name in others:
        (tmp_path / name).write_text(json.dumps(other if name == "mine.json" else {}))
    write_figure(make_figure("c"), tmp_path)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"spectrum.json", "spectrum_c.jpg"} | others
    # A JSON that was edited removes nothing but images of that figure.
    named = ["spectrum_c.jpg", "notes.txt", "../a.jpg", "spectrum_/../inner.jpg", 3]
    (tmp_path / "spectrum.json").write_text(json.dumps({"name": "spectrum", "files": named}))
    for name in ("curves", "none", "../spectrum", "mine", "spectrum"):
        remove_figure(name, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == others


def test_an_overlay_is_brightest_at_the_peak_of_the_map_in_the_image_s_frame():
    grey = np.full((24, 40, 3), 128, dtype=np.uint8)
    values = np.zeros((4, 6))  # reaches beyond the image, which is padded to multiples of 8
    values[1, 3] = 1.0
    brightness = overlay_map(grey, values, stride=8, high=1.0).astype(int).sum(axis=2)
    rows, columns = np.nonzero(brightness == brightness.max())
    assert ({*rows}, {*columns}) == ({11, 12}, {27, 28})  # the centre of position (1, 3)
    # viridis begins at (68, 1, 84), and values beyond its ends have the colours of the ends.
    dark = overlay_map(grey, -np.ones((3, 5)), stride=8, high=1.0)[0, 0]
    np.testing.assert_allclose(dark, 0.65 * np.array([68, 1, 84]) + 0.35 * 128, atol=1.01)


RED = (200, 10, 10)


def grey(height, width):
    return np.full((height, width, 3), 90, np.uint8)


def boxes(*rows):
    return np.array(rows, dtype=np.float64).reshape(-1, 4)


def test_outlines_lie_on_their_boxes_and_small_images_are_enlarged():
    image = grey(400, 500)
    drawn = draw_boxes(image, boxes([100, 200, 300, 350]), ["eel"], [RED])
    for x, y in [(100, 280), (300, 280), (200, 350)]:  # the label may cover the top
        assert tuple(drawn[y, x]) == RED
    np.testing.assert_array_equal(drawn[280, 200], 90)
    np.testing.assert_array_equal(image, grey(400, 500))  # the input is not drawn on
    np.testing.assert_array_equal(draw_boxes(image, boxes(), [], []), image)
    large = draw_boxes(grey(64, 128), boxes([32, 16, 96, 48]), [""], [RED])
    assert large.shape == (384, 768, 3)
    assert tuple(large[200, 32 * 6]) == RED

    beyond = draw_boxes(grey(400, 400), boxes([-50, -50, 900, 900]), ["x" * 99], [RED])
    assert tuple(beyond[200, 0]) == tuple(beyond[200, 399]) == RED
    for odd in ([500, 500, 520, 520], [10, 10, 10, 10], [-9, -9, 999, 5]):
        draw_boxes(grey(40, 40), boxes(odd), ["a"], [RED])
        assert crop_box(grey(40, 40), np.array(odd, dtype=np.float64), RED, 240).size


def test_instances_have_class_colors_scores_and_masks():
    mask = torch.zeros(1, 400, 400, dtype=torch.bool)
    mask[0, 200:300, 200:300] = True
    corners = torch.tensor([[150.0, 150.0, 350.0, 350.0]], requires_grad=True)
    detections = Instances(
        (400, 400),
        pred_boxes=Boxes(corners),
        pred_classes=torch.tensor([1]),
        scores=torch.tensor([0.5]),
        pred_masks=mask,
    )
    truth = Instances(
        (400, 400), gt_boxes=Boxes(corners), gt_classes=torch.tensor([1]), gt_masks=BitMasks(mask)
    )
    color = np.asarray(get_class_color(1))
    pictures = [draw_instances(grey(400, 400), one, ["eel"]) for one in (detections, truth)]
    for picture in pictures:
        np.testing.assert_array_equal(picture[250, 250], (54 + 0.4 * color).astype(np.uint8))
        np.testing.assert_array_equal(picture[310, 250], 90)
        np.testing.assert_array_equal(picture[280, 150], color)
    assert (pictures[0] != 90).any(2).sum() > (pictures[1] != 90).any(2).sum()  # the score


def test_classes_are_drawn_with_the_matrix_of_the_evaluator(tmp_path):
    folder = tmp_path / "run" / "inference" / "flowers"
    names = ["cat", "dog", "bird"]
    evaluator = ClassificationEvaluator("flowers", class_names=names, output_dir=str(folder))
    for index, scores in enumerate(torch.rand(20, 3, generator=torch.Generator().manual_seed(0))):
        entry = {"image_id": index, "label": min(index % 4, 2)}
        evaluator.process([entry], [{"scores": scores.softmax(0)}])
    evaluator.evaluate()
    (tmp_path / "run" / "metrics.json").touch()
    figure = draw_classes([Run.open(tmp_path / "run")], FigureOptions())
    data = figure.data["runs"]["run"]
    assert data["classes"] == names
    np.testing.assert_array_equal(data["matrix"], evaluator.confusion)
    assert figure.table.rows[0][1] == f"{100 * evaluator.confusion.trace() / 20:.2f}"
    (folder / "classification.json").unlink()
    with pytest.raises(NotApplicable, match=r"'run' has no .*classification\.json"):
        draw_classes([Run.open(tmp_path / "run")], FigureOptions())


@pytest.mark.parametrize("num_classes", [1, 12, 300])
def test_the_chart_lists_the_most_frequent_confusions(num_classes):
    matrix = np.random.default_rng(0).poisson(0.05, (num_classes, num_classes))
    matrix[np.diag_indices(num_classes)] = 8
    matrix[0, -1] = 40
    text = plot_confusion(matrix, [f"kind {i}" for i in range(num_classes)]).axes[1].texts[0]
    wrong = matrix.sum() - matrix.trace()
    assert f"({wrong:,} of {matrix.sum():,} images are wrong)" in text.get_text()
    if num_classes == 12:
        assert f"kind 0 → kind 11:  40 of {matrix[0].sum()}" in text.get_text()
