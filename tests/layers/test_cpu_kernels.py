# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Dropout whose masks are drawn in 16-bit numbers."""

import pytest
import torch
from torch.testing import assert_close

from qbheat_det.layers import Dropout
from qbheat_det.layers.cpu_kernels import draw_kept, rounded


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_as_many_numbers_are_dropped_as_asked_for(rate: float) -> None:
    torch.manual_seed(0)
    kept = draw_kept((3, 8, 100, 101), rate)
    assert kept.dtype == torch.int8
    assert kept.shape == (3, 8, 100, 101)
    assert set(kept.unique().tolist()) == {0, 1}
    assert_close(kept.double().mean().item(), 1 - rate, rtol=0, atol=0.005)
    assert_close(rounded(rate), rate, rtol=0, atol=1e-5)


def test_pytorchs_seed_decides_and_goes_on() -> None:
    torch.manual_seed(5)
    first, second = draw_kept((1000,), 0.5), draw_kept((1000,), 0.5)
    torch.manual_seed(5)
    assert_close(draw_kept((1000,), 0.5), first)
    assert not torch.equal(first, second)


def test_the_layer_multiplies_by_its_mask_forward_and_backward() -> None:
    x = torch.randn(4, 9, 33, requires_grad=True)
    layer = Dropout(0.25)
    torch.manual_seed(1)
    found = layer(x)
    torch.manual_seed(1)
    factor = draw_kept(x.shape, 0.25) / 0.75
    assert_close(found, x * factor)
    above = torch.randn_like(x)
    assert_close(torch.autograd.grad(found, x, above)[0], above * factor)
