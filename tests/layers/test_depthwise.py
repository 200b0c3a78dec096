# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Depthwise convolutions that train faster, against PyTorch's."""

import copy

import pytest
import torch
from timm.layers import Conv2dSame
from torch import nn
from torch.testing import assert_close

from qbheat_det.layers.depthwise import speed_up_depthwise

LAYERS = {
    "5x5": lambda: nn.Conv2d(8, 8, 5, padding=2, groups=8, bias=False),
    "7x7 with stride": lambda: nn.Conv2d(8, 16, 7, padding=3, stride=2, groups=8),
    "several outputs": lambda: nn.Conv2d(8, 24, 3, padding=1, groups=8),
    "dilated": lambda: nn.Conv2d(8, 8, (3, 4), padding=(0, 1), dilation=2, groups=8),
    "3x3 with stride": lambda: nn.Conv2d(8, 8, 3, padding=1, stride=2, groups=8),
    "timm's padding": lambda: Conv2dSame(8, 8, 5, stride=2, groups=8),
    "reflection": lambda: nn.Conv2d(8, 8, 5, padding=2, padding_mode="reflect", groups=8),
}


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["float64", "bfloat16"])
def test_outputs_and_gradients_are_those_of_pytorch(make, dtype):
    torch.manual_seed(0)
    plain = make().double()
    fast = copy.deepcopy(plain)
    speed_up_depthwise(fast)
    assert fast._compiled_call_impl is not None
    found = []
    for layer, is_half in ((plain, False), (fast, dtype == torch.bfloat16)):
        x = torch.linspace(-1, 1, 2 * 8 * 13 * 16, dtype=torch.float64).view(2, 8, 13, 16)
        x = x.contiguous(memory_format=torch.channels_last).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=is_half):
            y = layer(x if not is_half else x.float())
        assert y.dtype == (dtype if layer is fast else torch.float64)
        gradients = torch.autograd.grad(y.double().square().sum(), [x, *layer.parameters()])
        found.append([y.double(), *gradients])
    for theirs, ours in zip(*found, strict=True):
        limit = 0.02 * float(theirs.detach().abs().max()) if dtype == torch.bfloat16 else 1e-9
        assert_close(ours, theirs, rtol=0, atol=limit)


def test_other_convolutions_and_copies_stay_as_they_are():
    model = nn.Sequential(
        nn.Conv2d(8, 8, 3, groups=8),
        nn.Conv2d(8, 8, 5, stride=2),
        *(make() for make in LAYERS.values()),
    )
    before = copy.deepcopy(model)
    speed_up_depthwise(model)
    changed = [layer._compiled_call_impl is not None for layer in model]
    assert changed == [False, False] + [True] * len(LAYERS)
    assert all(layer._compiled_call_impl is None for layer in copy.deepcopy(model))
    x = torch.randn(2, 8, 64, 64)
    for each, plain in zip(model[2:], before[2:], strict=True):
        assert torch.equal(each.eval()(x), plain(x))
