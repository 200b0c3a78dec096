# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Depthwise convolutions that train faster, against PyTorch's."""

import copy

import pytest
import torch
from detectron2.layers import Conv2d, FrozenBatchNorm2d
from timm.layers import Conv2dSame
from torch import nn
from torch.testing import assert_close

from qbheat_det.fast import count_fast_layers, optimize
from qbheat_det.modeling.backbone.timm_backbone import TraceableConv2dSame

LAYERS = {
    "5x5": lambda: nn.Conv2d(8, 8, 5, padding=2, groups=8, bias=False),
    "7x7 with stride": lambda: nn.Conv2d(8, 16, 7, padding=3, stride=2, groups=8),
    "dilated": lambda: nn.Conv2d(8, 8, (3, 4), padding=(0, 1), dilation=2, groups=8),
    "3x3 with stride": lambda: nn.Conv2d(8, 8, 3, padding=1, stride=2, groups=8),
    "timm's padding": lambda: TraceableConv2dSame.from_conv(Conv2dSame(8, 8, 5, 2, groups=8)),
    "Detectron2's": lambda: Conv2d(
        8, 16, 3, 2, 1, groups=8, norm=FrozenBatchNorm2d(16), activation=torch.relu
    ),
}
PLAIN = (
    nn.Conv2d(8, 8, 3, groups=8),
    nn.Conv2d(8, 8, 5, stride=2),
    nn.Conv2d(8, 24, 3, padding=1, groups=8),
    nn.Conv2d(8, 8, 5, padding=2, padding_mode="reflect", groups=8),
    nn.Conv2d(8, 8, 5, padding="same", groups=8),
)


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["float64", "bfloat16"])
def test_outputs_and_gradients_are_those_of_pytorch(make, dtype):
    torch.manual_seed(0)
    plain = nn.Sequential(make()).double()
    fast = copy.deepcopy(plain)
    optimize(fast, "cpu_training")
    assert count_fast_layers(fast) == 1
    results = []
    for model, is_half in ((plain, False), (fast, dtype == torch.bfloat16)):
        x = torch.linspace(-1, 1, 2 * 8 * 13 * 16, dtype=torch.float64).view(2, 8, 13, 16)
        x = x.contiguous(memory_format=torch.channels_last).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=is_half):
            y = model(x.float() if is_half else x)
        gradients = torch.autograd.grad(y.double().square().sum(), [x, *model.parameters()])
        results.append([y.double(), *gradients])
    for expected, computed in zip(*results, strict=True):
        limit = 1e-9
        if dtype == torch.bfloat16:
            limit = 0.02 * float(expected.detach().abs().max())
        assert_close(computed, expected, rtol=0, atol=limit)


@pytest.mark.parametrize("width", [1, 2, 3, 5])
@pytest.mark.parametrize("side", [7, 11])
def test_columns_of_a_wide_weight_may_read_nothing_but_padding(side, width):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(8, 8, side, padding=side // 2, groups=8)).double()
    fast = copy.deepcopy(plain)
    optimize(fast, "cpu_training")
    assert count_fast_layers(fast) == 1
    x = torch.randn(2, 8, 4, width, dtype=torch.float64)
    for model in (plain, fast):
        model(x).square().sum().backward()
    assert_close(fast[0].weight.grad, plain[0].weight.grad)


def test_other_convolutions_stay_plain():
    model = nn.Sequential(*PLAIN)
    optimize(model, "cpu_training")
    assert count_fast_layers(model) == 0


def test_a_frozen_layer_gets_no_gradient():
    model = nn.Sequential(LAYERS["5x5"]()).requires_grad_(False)
    optimize(model, "cpu_training")
    x = torch.randn(1, 8, 6, 6, requires_grad=True)
    model(x).sum().backward()
    assert x.grad is not None
    assert model[0].weight.grad is None
