# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Dynamic ReLU: its start, its formula and its range."""

import torch
from torch.testing import assert_close

from qbheat_det.layers import DynamicReLU

from ..modeling.parameter_names import DYNAMIC_RELU, randomise_, renamed
from ..modeling.reference_mobile_former import Weights, dynamic_relu


def test_it_starts_close_to_a_plain_relu() -> None:
    torch.manual_seed(0)
    activation = DynamicReLU(token_dim=192, channels=64)
    x = torch.randn(2, 64, 6, 6)
    assert_close(activation(x, torch.randn(2, 192)), x.relu(), rtol=0, atol=0.02)


def test_slopes_follow_from_hand_arithmetic() -> None:
    activation = DynamicReLU(token_dim=4, channels=2)
    with torch.no_grad():
        activation.squeeze.weight.copy_(torch.tensor([[1.0, 0, 0, 0]]))
        activation.squeeze.bias.zero_()
        activation.slopes.weight.copy_(torch.tensor([[1.5], [-1.5], [3.0], [0.0]]))
        activation.slopes.bias.copy_(torch.tensor([0.0, 0.0, 0.0, -1.5]))
    # Token 1: theta = hardsigmoid(1.5, -1.5, 3, -1.5) = (0.75, 0.25, 1, 0.25), so that
    # a1 = (1.5, 0.5) and a2 = (1, -0.5).
    x = torch.tensor([[2.0, -2.0], [2.0, -2.0]]).reshape(1, 2, 1, 2)
    expected = torch.tensor([[3.0, -2.0], [1.0, 1.0]]).reshape(1, 2, 1, 2)
    assert_close(activation(x, torch.tensor([[1.0, 9, 9, 9]])), expected)
    # A negative token is cut off by the inner ReLU: a1 = (1, 1) and a2 = (0, -0.5).
    expected = torch.tensor([[2.0, 0.0], [2.0, 1.0]]).reshape(1, 2, 1, 2)
    assert_close(activation(x, torch.tensor([[-1.0, 9, 9, 9]])), expected)


def test_it_is_the_larger_of_two_lines_for_each_image_and_channel() -> None:
    activation = DynamicReLU(token_dim=16, channels=12).double()
    randomise_(activation)
    torch.nn.init.normal_(activation.slopes.bias, std=3)  # saturates the slopes at both ends
    x, tokens = torch.randn(3, 12, 5, 4).double(), torch.randn(3, 16).double()
    weights = Weights(renamed(activation, DYNAMIC_RELU))
    expected = [dynamic_relu(weights, *pair) for pair in zip(x, tokens, strict=True)]
    assert_close(activation(x, tokens), torch.stack(expected))
    assert weights.names_read == set(weights.tensors)


def test_gradients_agree_with_finite_differences() -> None:
    activation = DynamicReLU(token_dim=8, channels=3).double()
    randomise_(activation)
    x = torch.randn(2, 3, 2, 2, dtype=torch.float64, requires_grad=True)
    token = torch.randn(2, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(activation, (x, token))
