# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Two quarters of each image: which they are, and how they are drawn."""

import torch

from qbheat_det.modeling.pretrain import CORNERS
from qbheat_det.modeling.pretrain.wasserstein import AreaPairs

CPU = torch.device("cpu")


def test_areas_are_the_quarters_that_a_slice_gives() -> None:
    images = torch.rand(12, 3, 8, 8)
    first = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3])
    second = torch.tensor([1, 2, 3, 0, 2, 3, 0, 1, 3, 0, 1, 2])
    found = AreaPairs(first, second).crop(images)
    slices = {
        "top_left": (slice(0, 4), slice(0, 4)),
        "top_right": (slice(0, 4), slice(4, 8)),
        "bottom_left": (slice(4, 8), slice(0, 4)),
        "bottom_right": (slice(4, 8), slice(4, 8)),
    }
    for areas, corners in zip(found, (first, second), strict=True):
        for image, area, corner in zip(images, areas, corners.tolist(), strict=True):
            rows, columns = slices[CORNERS[corner]]
            assert torch.equal(area, image[:, rows, columns])


def test_corners_come_first_equally_often_and_never_twice_in_an_image() -> None:
    torch.manual_seed(0)
    pairs = [AreaPairs.draw(10, device=CPU) for _ in range(600)]
    for pair in pairs:
        assert sorted(pair.first.bincount(minlength=4).tolist()) == [2, 2, 3, 3]
        assert not (pair.first == pair.second).any()
    first = torch.cat([pair.first for pair in pairs])
    second = torch.cat([pair.second for pair in pairs])
    counts = (4 * first + second).bincount(minlength=16).view(4, 4).double()
    expected = torch.full((4, 4), 500.0, dtype=torch.float64).fill_diagonal_(0.0)
    # Five standard deviations of a count of 6,000 with chance 1/12.
    torch.testing.assert_close(counts, expected, rtol=0, atol=5 * 21.4)
