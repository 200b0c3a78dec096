# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The fast dynamic ReLU against the plain one."""

import copy

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from qbheat_det.fast.dynamic_relu import TwoSlopeReLU
from qbheat_det.layers import DynamicReLU

from ..modeling.reference_mobile_former import randomise_


def build():
    """Returns a dynamic ReLU whose first slope is the smaller in some channels."""
    torch.manual_seed(0)
    activation = DynamicReLU(token_dim=16, channels=12).double()
    randomise_(activation)
    nn.init.normal_(activation.slopes.bias, std=3)  # saturates the slopes at both ends
    return activation


@pytest.mark.parametrize("saturated", [False, True])
def test_outputs_and_gradients_are_those_of_the_plain_formula(saturated):
    plain = build()
    if saturated:
        nn.init.constant_(plain.slopes.bias, -9.0)  # slopes 0 and -1
    fast = TwoSlopeReLU.of(copy.deepcopy(plain))
    results = []
    for activation in (plain, fast):
        x = torch.linspace(-1, 1, 2 * 12 * 3 * 4, dtype=torch.float64).view(2, 12, 3, 4)
        token = torch.linspace(-1, 1, 2 * 16, dtype=torch.float64).view(2, 16)
        x.requires_grad_()
        token.requires_grad_()
        y = activation(x, token)
        inputs = [x, token, *activation.parameters()]
        results.append([y, *torch.autograd.grad(y.square().sum(), inputs)])
        with torch.no_grad():
            assert_close(activation(x, token), y)
    assert_close(*results)


def test_gradients_are_correct():
    activation = TwoSlopeReLU.of(build())
    x = torch.randn(2, 12, 2, 2, dtype=torch.float64, requires_grad=True)
    tokens = torch.randn(2, 16, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(activation, (x, tokens))


def test_a_map_in_float32_stays_in_float32_under_autocast():
    plain = build().float()
    fast = TwoSlopeReLU.of(copy.deepcopy(plain))
    x = torch.randn(2, 12, 3, 4)
    token = torch.randn(2, 16)
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(fast(x, token), plain(x, token), rtol=0, atol=0)
