# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Scattered masks are evenly drawn, and those of evaluation belong to the image."""

import pytest
import torch

from qbheat_det.modeling.pretrain import RandomMask

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("grid", "ratio", "count"), [(8, 0.75, 16), (16, 0.75, 64), (4, 0.6, 6), (2, 0.5, 2)]
)
def test_as_many_positions_are_visible_in_each_image(grid: int, ratio: float, count: int) -> None:
    visible = RandomMask(grid_size=grid, mask_ratio=ratio).draw(50, device=CPU)
    assert visible.shape == (50, grid, grid)
    assert visible.dtype == torch.bool
    assert set(visible.sum(dim=(1, 2)).tolist()) == {count}


def test_the_mask_of_an_image_follows_from_its_name_alone() -> None:
    mask = RandomMask(grid_size=8)
    torch.manual_seed(3)
    expected = torch.rand(())
    torch.manual_seed(3)
    together = mask.of_images(["a", "b", "c"], device=CPU)
    torch.testing.assert_close(torch.rand(()), expected, rtol=0, atol=0)
    assert torch.equal(together[1:2], mask.of_images(["b"], device=CPU))
    assert not torch.equal(together[0], together[1])
    assert together.sum() == 3 * 16
