# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Attention by matrix products against the plain layer."""

from unittest.mock import Mock

import pytest
import torch
from torch.testing import assert_close

from qbheat_det.fast import attention
from qbheat_det.fast.attention import ProductAttention
from qbheat_det.layers import DotProductAttention


def draw(dtype):
    """Returns queries (2, 4, 5, 3), keys and values (2, 4, 9, 3) with gradients."""
    torch.manual_seed(0)
    lengths = (5, 9, 9)
    return [torch.randn(2, 4, n, 3).to(dtype).requires_grad_() for n in lengths]


def test_matrix_products_in_bfloat16_come_near_the_plain_layer():
    masked = torch.arange(9).expand(2, 1, 1, -1) >= torch.tensor([9, 6])[:, None, None, None]
    results = []
    for layer, dtype in (
        (DotProductAttention(), torch.float64),
        (ProductAttention(), torch.bfloat16),
    ):
        tensors = draw(dtype)
        attended = layer(*tensors, masked=masked)
        gradients = torch.autograd.grad(attended.double().square().sum(), tensors)
        results.append([each.double() for each in (attended, *gradients)])
    for expected, computed in zip(*results, strict=True):
        limit = 0.03 * float(expected.detach().abs().max())
        assert_close(computed, expected, rtol=0, atol=limit)


@pytest.mark.parametrize(
    ("dtype", "max_weights", "is_called"),
    [
        (torch.bfloat16, 4 * 5 * 9, False),
        (torch.bfloat16, 4 * 5 * 9 - 1, True),  # too many weights to store
        (torch.float32, 4 * 5 * 9, True),
    ],
)
def test_pytorchs_kernel_is_used_where_it_is_faster(dtype, max_weights, is_called, monkeypatch):
    kernel = Mock(wraps=DotProductAttention.forward)
    monkeypatch.setattr(
        DotProductAttention, "forward", lambda self, *args, **named: kernel(self, *args, **named)
    )
    monkeypatch.setattr(attention, "_MAX_WEIGHTS", max_weights)
    ProductAttention()(*draw(dtype))
    assert kernel.called is is_called
