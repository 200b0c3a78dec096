# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Draws are balanced, and what is cropped is what is said to be visible."""

import pytest
import torch

from qbheat_det.modeling.pretrain import QUADRANTS, VisibleQuarters, visible_positions

CPU = torch.device("cpu")
# First row and column of the visible quarter of 8 x 8, counted by hand.
FIRST = {
    "top_left": (0, 0),
    "top_right": (0, 4),
    "bottom_left": (4, 0),
    "bottom_right": (4, 4),
    "centre": (2, 2),
}


@pytest.mark.parametrize("visible", ["corner", "centre", "both"])
@pytest.mark.parametrize("num_images", range(1, 14))
def test_places_are_shared_out_as_evenly_as_the_batch_allows(visible: str, num_images: int) -> None:
    for _ in range(10):
        drawn = VisibleQuarters.draw(num_images, visible=visible, device=CPU)
        *corners, _ = drawn.counts
        assert sum(drawn.counts) == num_images
        assert max(corners) - min(corners) <= 1
        at_corners = {"corner": [num_images], "centre": [0]}.get(
            visible, [num_images // 2, num_images - num_images // 2]
        )
        assert sum(corners) in at_corners
        assert drawn.order.sort().values.tolist() == list(range(num_images))


def test_the_crop_is_the_visible_quarter_pixel_by_pixel() -> None:
    names = ["centre", "bottom_left", "top_left", "bottom_right", "top_right", "bottom_left"]
    images = torch.arange(6 * 2 * 8 * 8).reshape(6, 2, 8, 8)
    quarters = VisibleQuarters.at(names, device=CPU)
    crops = quarters.crop(images[quarters.order])
    assert crops.shape == (6, 2, 4, 4)
    for row, image in enumerate(quarters.order.tolist()):
        top, left = FIRST[names[image]]
        for y in range(4):
            for x in range(4):
                expected = images[image, :, top + y, left + x]
                torch.testing.assert_close(crops[row, :, y, x], expected)


def test_the_mask_marks_what_the_crop_takes() -> None:
    masks = visible_positions(8)
    for place, mask in zip(QUADRANTS, masks, strict=True):
        top, left = FIRST[place]
        marked = {(y, x) for y in range(8) for x in range(8) if mask[y, x]}
        assert marked == {(top + y, left + x) for y in range(4) for x in range(4)}
