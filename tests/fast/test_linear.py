# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Linear layers as convolutions against PyTorch's."""

import copy
from unittest.mock import Mock

import pytest
import torch
from timm.models.vision_transformer import Block
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from qbheat_det.fast import linear, optimize
from qbheat_det.fast.linear import ConvolvedLinear, convolve_rows
from qbheat_det.layers import MapAttention


class Attending(nn.Module):
    """Self-attention."""

    def __init__(self):
        super().__init__()
        self.attention = MapAttention(dim=16, num_heads=2)

    def forward(self, x):
        return self.attention(x, x, x)


@pytest.fixture
def convolve(monkeypatch):
    """Pretends that convolutions are faster, and records them."""
    monkeypatch.setattr(linear, "prefers_convolutions", lambda: True)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    record = Mock(side_effect=F.conv2d)
    monkeypatch.setattr(F, "conv2d", record)
    return record


@pytest.mark.parametrize(
    ("build", "count"), [(lambda: Block(16, 2), 4), (Attending, 3)], ids=["block", "attention"]
)
def test_outputs_and_gradients_are_pytorchs(build, count, convolve):
    torch.manual_seed(0)
    plain = build().eval()
    fast = copy.deepcopy(plain)
    optimize(fast, "cpu_training")
    x = torch.randn(2, 40, 16, requires_grad=True)
    results = []
    for module in (plain, fast):
        y = module(x)
        gradients = torch.autograd.grad(y.square().sum(), [x, *module.parameters()])
        results.append([y, *gradients])
    assert_close(*results)
    assert_close(fast.state_dict(), plain.state_dict())
    assert convolve.call_count == count


def test_few_rows_other_types_and_autocast_use_matrix_products(convolve):
    for rows, dtype in ((63, torch.float32), (64, torch.float64), (64, torch.bfloat16)):
        convolve_rows(torch.zeros(rows, 8, dtype=dtype), torch.zeros(5, 8, dtype=dtype), None)
    with torch.autocast("cpu", torch.bfloat16):
        convolve_rows(torch.zeros(64, 8), torch.zeros(5, 8), None)
    assert not convolve.called


def test_layers_stay_plain_where_matrix_products_are_faster(monkeypatch):
    monkeypatch.setattr(linear, "prefers_convolutions", lambda: False)
    block = Block(16, 2)
    optimize(block, "cpu_training")
    assert not any(isinstance(layer, ConvolvedLinear) for layer in block.modules())
