# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Drawn boxes: where they are and in which colors; crops of errors and their text."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from detectron2.structures import BitMasks, Boxes, Instances
from PIL import Image

from qbheat_det.analysis import detection_images
from qbheat_det.analysis.box_drawing import (
    BACKGROUND,
    add_heading,
    draw_boxes,
    draw_instances,
    get_class_color,
    get_class_name,
    tile_images,
)
from qbheat_det.analysis.detection_errors import find_errors
from qbheat_det.analysis.detection_images import (
    FOUND_COLOR,
    TRUTH_COLOR,
    Crop,
    draw_crop,
    draw_false_alarms,
    draw_missed_boxes,
    draw_predictions,
)
from qbheat_det.analysis.detection_scores import evaluate_boxes
from tests.analysis.detection_cases import make_found, make_truth

NAMES = ["eel", "ray"]
RED = (200, 10, 10)


def grey(height: int, width: int) -> np.ndarray:
    return np.full((height, width, 3), 90, np.uint8)


def boxes(*rows: list[float]) -> np.ndarray:
    return np.array(rows, dtype=np.float64).reshape(-1, 4)


def test_outlines_lie_on_their_boxes_and_small_images_are_enlarged() -> None:
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


def test_small_boxes_stay_visible_and_boxes_outside_the_image_are_clipped() -> None:
    rows = boxes([5, 150, 65, 250], [5, 5, 390, 390])
    assert tuple(draw_boxes(grey(400, 400), rows, [""] * 2, [RED, (0, 0, 9)])[200, 5]) == RED
    beyond = draw_boxes(grey(400, 400), boxes([-50, -50, 900, 900]), ["x" * 99], [RED])
    assert tuple(beyond[200, 0]) == tuple(beyond[200, 399]) == RED
    for odd in ([500, 500, 520, 520], [10, 10, 10, 10], [-9, -9, 999, 5]):
        draw_boxes(grey(40, 40), boxes(odd), ["a"], [RED])


def test_instances_have_class_colors_scores_and_masks() -> None:
    mask = torch.zeros(1, 400, 400, dtype=torch.bool)
    mask[0, 200:300, 200:300] = True
    corners = torch.tensor([[150.0, 150.0, 350.0, 350.0]], requires_grad=True)
    found = Instances((400, 400), pred_boxes=Boxes(corners), pred_classes=torch.tensor([1]),
                      scores=torch.tensor([0.5]), pred_masks=mask)  # fmt: skip
    truth = Instances((400, 400), gt_boxes=Boxes(corners), gt_classes=torch.tensor([1]),
                      gt_masks=BitMasks(mask))  # fmt: skip
    color = np.asarray(get_class_color(1))
    pictures = [draw_instances(grey(400, 400), one, NAMES) for one in (found, truth)]
    for picture in pictures:
        np.testing.assert_array_equal(picture[250, 250], (54 + 0.4 * color).astype(np.uint8))
        np.testing.assert_array_equal(picture[310, 250], 90)
        np.testing.assert_array_equal(picture[280, 150], color)
    assert (pictures[0] != 90).any(2).sum() > (pictures[1] != 90).any(2).sum()  # the score
    assert len({get_class_color(k) for k in range(80)}) == 80
    assert get_class_name(NAMES, 2) == "class 2"


def test_tiles_are_centered_in_equal_cells() -> None:
    images = [np.full((h, w, 3), v, np.uint8) for h, w, v in [(4, 6, 50), (2, 6, 99), (4, 2, 150)]]
    sheet = tile_images(images, columns=2, gap=2)
    assert sheet.shape == (10, 14, 3)
    np.testing.assert_array_equal(sheet[1:3, 8:14], 99)
    np.testing.assert_array_equal(sheet[6:10, 2:4], 150)
    assert add_heading(grey(40, 60), "w" * 200, "b").shape[1] == 60
    with pytest.raises(ValueError, match="at least one image"):
        tile_images([], columns=2)


@pytest.mark.parametrize(
    ("shape", "box", "dark"),
    [((400, 600), [260, 160, 340, 240], False), ((400, 600), [0, 0, 80, 80], False),
     ((50, 300), [0, 0, 300, 50], True)],
)  # fmt: skip
def test_a_crop_has_the_box_and_as_much_around_it_as_the_image_has(
    shape: tuple[int, int], box: list[int], dark: bool
) -> None:
    lines = ("a", "b")
    for truth, color in ((True, TRUTH_COLOR), (False, FOUND_COLOR)):
        own, none = boxes(box), boxes()
        crop = Crop(1, own[0], own if truth else none, none if truth else own, lines)
        cell = draw_crop(grey(*shape), crop)[-240:]
        assert cell.shape == (240, 240, 3)
        assert (cell == color).all(2).any()
        assert (cell == 90).all(2).any()
        assert (tuple(cell[3, 120]) == BACKGROUND) == dark


def test_a_crop_centers_its_box_at_twice_its_size() -> None:
    own = boxes([260, 160, 340, 240])
    cell = draw_crop(grey(400, 600), Crop(1, own[0], own, boxes(), ("a", "b")))[-240:]
    # 160 pixels become 240, so the box spans 60 to 180.
    for x, y in ((60, 120), (180, 120), (120, 60), (120, 180)):
        assert tuple(cell[y, x]) == TRUTH_COLOR


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for index in (1, 2):
        Image.fromarray(grey(100, 100)).save(tmp_path / f"{index}.png")
    return tmp_path


def test_crops_say_what_is_missed_and_what_is_a_false_alarm(root: Path) -> None:
    truth = make_truth([(1, 3, [0, 0, 50, 50]), (1, 7, [60, 60, 90, 90])], num_images=2)
    found = [(1, 7, [0, 0, 50, 40], 0.25), (1, 7, [0, 0, 20, 50], 0.5), (2, 3, [0, 0, 9, 9], 0.3)]
    errors = find_errors(evaluate_boxes(truth, make_found(found)))
    sources: tuple[Any, ...] = (truth["images"], root, NAMES, errors)
    missed = draw_missed_boxes(*sources, [0, 1], "run")
    assert missed is not None
    assert missed.alt == (
        "eel, 25 % of image, best: ray 0.25, IoU 0.80; ray, 9 % of image, no detection at any score"
    )
    alarms = draw_false_alarms(*sources, [1, 2], "run")
    assert alarms is not None
    assert alarms.alt == "ray 0.50, nearest: eel, IoU 0.40; eel 0.30, overlaps no box"
    assert draw_false_alarms(*sources, [], "run") is None


def test_predictions_are_spread_over_the_images_and_unreadable_ones_skipped(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    truth = make_truth([(1, 3, [0, 0, 50, 50])], num_images=2)
    errors = find_errors(evaluate_boxes(truth, make_found([(1, 3, [0, 0, 50, 50], 0.9)])))
    drawn: list[int] = []
    monkeypatch.setattr(detection_images, "draw_boxes",
                        lambda image, rows, *_: drawn.append(len(rows)) or image)  # fmt: skip
    runs = {"low": (errors, 0.5), "high": (errors, 0.95)}
    images = draw_predictions(truth["images"], root, NAMES, runs, 6)
    assert drawn == [1, 1, 0, 0, 0, 0]  # ground truth, low and high, on two images
    assert [image.caption for image in images.values()] == ["1.png", "2.png"]
    (root / "1.png").write_bytes(b"no image")
    assert list(draw_predictions(truth["images"], root, NAMES, runs, 6)) == ["predictions_1"]
