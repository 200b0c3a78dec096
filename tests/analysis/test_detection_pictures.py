# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Drawn boxes: where they are, in which colour, and that nothing else is touched."""

import numpy as np
import pytest
import torch
from detectron2.structures import Boxes, BoxMode, Instances

from qbheat_det.analysis.detection_pictures import (
    DrawnBoxes,
    draw_boxes,
    draw_side_by_side,
    get_class_color,
    get_class_name,
    tile_pictures,
)

NAMES = ["square", "disc"]


def _grey(height: int, width: int) -> np.ndarray:
    return np.full((height, width, 3), 90, np.uint8)


def _drawn(*boxes: list[float], **kwargs: np.ndarray) -> DrawnBoxes:
    classes = np.arange(len(boxes)) % 2
    return DrawnBoxes(np.asarray(boxes, dtype=np.float64).reshape(-1, 4), classes, **kwargs)


def test_an_outline_lies_on_its_box_in_the_colour_of_its_class() -> None:
    picture = draw_boxes(_grey(400, 500), _drawn([100, 200, 300, 350]), NAMES)
    assert picture.shape == (400, 500, 3)
    color = get_class_color(0)
    for x, y in [(100, 280), (300, 280), (200, 350)]:  # the label may cover the top
        assert tuple(picture[y, x]) == color
    np.testing.assert_array_equal(picture[280, 200], 90)


def test_small_images_are_enlarged_with_their_boxes() -> None:
    picture = draw_boxes(_grey(64, 128), _drawn([32, 16, 96, 48]), NAMES, min_side=384)
    assert picture.shape == (384, 768, 3)
    assert tuple(picture[200, 32 * 6]) == get_class_color(0)
    assert draw_boxes(_grey(64, 128), _drawn(), NAMES, min_side=0).shape == (64, 128, 3)


def test_an_image_without_boxes_stays_as_it_is_and_the_input_is_not_drawn_on() -> None:
    image = _grey(400, 400)
    np.testing.assert_array_equal(draw_boxes(image, _drawn(), NAMES), image)
    draw_boxes(image, _drawn([10, 10, 200, 200]), NAMES)
    np.testing.assert_array_equal(image, _grey(400, 400))


def test_a_small_object_stays_visible_inside_a_large_one() -> None:
    small_first = draw_boxes(
        _grey(400, 400), _drawn([5, 150, 5 + 60, 250], [5, 5, 390, 390]), NAMES
    )
    assert tuple(small_first[200, 5]) == get_class_color(0)


def test_boxes_that_leave_the_image_are_drawn_at_its_edge() -> None:
    picture = draw_boxes(_grey(400, 400), _drawn([-50, -50, 900, 900]), NAMES)
    assert tuple(picture[200, 0]) == get_class_color(0)
    assert tuple(picture[200, 399]) == get_class_color(0)


def test_masks_tint_their_pixels_only() -> None:
    masks = np.zeros((1, 400, 400), dtype=bool)
    masks[0, 200:300, 200:300] = True
    picture = draw_boxes(_grey(400, 400), _drawn([150, 150, 350, 350], masks=masks), NAMES)
    expected = (0.6 * 90 + 0.4 * np.asarray(get_class_color(0))).astype(np.uint8)
    np.testing.assert_array_equal(picture[250, 250], expected)
    np.testing.assert_array_equal(picture[310, 250], 90)


def test_scores_make_the_label_longer() -> None:
    def label_pixels(drawn: DrawnBoxes) -> int:
        return int((draw_boxes(_grey(400, 400), drawn, NAMES) != 90).any(2).sum())

    box = [100.0, 100.0, 350.0, 350.0]
    assert label_pixels(_drawn(box, scores=np.array([0.5]))) > label_pixels(_drawn(box))


def test_classes_keep_their_colours_apart() -> None:
    colors = [get_class_color(i) for i in range(80)]
    assert len(set(colors)) == 80
    assert all(max(color) > 120 for color in colors)
    assert get_class_color(3) == colors[3]


def test_classes_without_a_name_are_numbered() -> None:
    assert [get_class_name(NAMES, i) for i in (0, 1, 2)] == ["square", "disc", "class 2"]


def test_model_output_and_annotations_are_read_alike() -> None:
    found = Instances((50, 60))
    found.pred_boxes = Boxes(torch.tensor([[1.0, 2.0, 11.0, 22.0]], requires_grad=True))
    found.pred_classes = torch.tensor([1])
    found.scores = torch.tensor([0.5])
    annotation = {"bbox": [1, 2, 10, 20], "bbox_mode": BoxMode.XYWH_ABS, "category_id": 1}
    crowd = {**annotation, "iscrowd": 1}
    predicted = DrawnBoxes.from_instances(found)
    truth = DrawnBoxes.from_dataset_dict({"annotations": [annotation, crowd]})
    np.testing.assert_array_equal(predicted.boxes, truth.boxes)
    np.testing.assert_array_equal(predicted.classes, truth.classes)
    np.testing.assert_array_equal(predicted.scores, [0.5])
    assert truth.scores is None
    assert DrawnBoxes.from_dataset_dict({"annotations": []}).boxes.shape == (0, 4)


def test_side_by_side_has_the_prediction_on_the_left() -> None:
    picture = draw_side_by_side(_grey(400, 400), _drawn([50, 50, 350, 350]), _drawn(), NAMES)
    assert picture.shape[1] == 806
    left, right = (picture == get_class_color(0)).all(2)[:, :400], picture[-400:, -400:]
    assert left.any()
    np.testing.assert_array_equal(right, _grey(400, 400))


def test_a_contact_sheet_centres_pictures_of_different_sizes() -> None:
    pictures = [
        np.full((h, w, 3), v, np.uint8) for h, w, v in [(4, 6, 50), (2, 6, 100), (4, 2, 150)]
    ]
    sheet = tile_pictures(pictures, columns=2, gap=2)
    assert sheet.shape == (10, 14, 3)
    np.testing.assert_array_equal(sheet[0:4, 0:6], 50)
    np.testing.assert_array_equal(sheet[1:3, 8:14], 100)
    np.testing.assert_array_equal(sheet[6:10, 2:4], 150)
    assert sum((sheet == v).all(2).sum() for v in (50, 100, 150)) == 24 + 12 + 8
    with pytest.raises(ValueError, match="at least one picture"):
        tile_pictures([], columns=2)
