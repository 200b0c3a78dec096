# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Drawn boxes: where they are and in which colors."""

import numpy as np
import torch
from detectron2.structures import BitMasks, Boxes, Instances

from qbheat_det.analysis.box_drawing import draw_boxes, draw_instances, get_class_color
from qbheat_det.analysis.detections import crop_box

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


def test_boxes_outside_the_image_are_clipped() -> None:
    beyond = draw_boxes(grey(400, 400), boxes([-50, -50, 900, 900]), ["x" * 99], [RED])
    assert tuple(beyond[200, 0]) == tuple(beyond[200, 399]) == RED
    for odd in ([500, 500, 520, 520], [10, 10, 10, 10], [-9, -9, 999, 5]):
        draw_boxes(grey(40, 40), boxes(odd), ["a"], [RED])
        assert crop_box(grey(40, 40), np.array(odd, dtype=np.float64), RED).size


def test_instances_have_class_colors_scores_and_masks() -> None:
    mask = torch.zeros(1, 400, 400, dtype=torch.bool)
    mask[0, 200:300, 200:300] = True
    corners = torch.tensor([[150.0, 150.0, 350.0, 350.0]], requires_grad=True)
    found = Instances((400, 400), pred_boxes=Boxes(corners), pred_classes=torch.tensor([1]),
                      scores=torch.tensor([0.5]), pred_masks=mask)  # fmt: skip
    truth = Instances((400, 400), gt_boxes=Boxes(corners), gt_classes=torch.tensor([1]),
                      gt_masks=BitMasks(mask))  # fmt: skip
    color = np.asarray(get_class_color(1))
    pictures = [draw_instances(grey(400, 400), one, ["eel"]) for one in (found, truth)]
    for picture in pictures:
        np.testing.assert_array_equal(picture[250, 250], (54 + 0.4 * color).astype(np.uint8))
        np.testing.assert_array_equal(picture[310, 250], 90)
        np.testing.assert_array_equal(picture[280, 150], color)
    assert (pictures[0] != 90).any(2).sum() > (pictures[1] != 90).any(2).sum()  # the score
