# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Fused blocks for inference against the plain blocks."""

import copy
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from qbheat_det.fast import FORMS, count_fast_layers, mobile_former, optimize
from qbheat_det.fast.dynamic_relu import TwoSlopeReLU
from qbheat_det.layers import DownMobile, DynamicReLU, LiteBottleneck, Mobile, SinePositionEncoding
from qbheat_det.modeling.detr.decoder_block import DecoderWidths, LevelMap, LiteMobile
from tests.modeling.reference_mobile_former import randomise_

SHAPES = {"token_dim": 8, "norm": "BN"}
BLOCKS = {
    "lite": LiteBottleneck(in_channels=4, hidden=12, out_channels=4, norm=""),
    "mobile": Mobile(in_channels=4, hidden=10, out_channels=4, **SHAPES),
    "wider": Mobile(in_channels=4, hidden=10, out_channels=6, **SHAPES),
    "down": DownMobile(in_channels=4, hidden=12, out_channels=6, second_hidden=18, **SHAPES),
    "lite of the decoder": LiteMobile(DecoderWidths(dim=8, num_heads=2, expansion=3)),
}


def fused(block):
    """Returns the form for inference of a copy of a block."""
    holder = nn.Sequential(copy.deepcopy(block))
    optimize(holder, "cpu_inference")
    assert type(holder[0]) is FORMS["cpu_inference"][type(block)]
    return holder[0]


def run(block, x, token, padding):
    """Runs a block on maps (N, 4, H, W) and tokens (N, 8)."""
    if isinstance(block, LiteBottleneck):
        return block(x, token, padding)[0]
    if not isinstance(block, LiteMobile):
        return block(x, token, padding)
    encoding = SinePositionEncoding(channels=8)(x.shape[-2:], padding)
    rows = torch.cat([x, x], dim=1).flatten(2).transpose(1, 2).contiguous()
    return block(LevelMap(rows, encoding, x.shape[-2:], padding), token[:, None])


@pytest.mark.parametrize("name", BLOCKS)
def test_a_fused_block_equals_the_plain_one(name, monkeypatch):
    convolve = Mock(side_effect=mobile_former.convolve)  # which plain blocks do not call
    monkeypatch.setattr(mobile_former, "convolve", convolve)
    torch.manual_seed(0)
    dtype = torch.float64
    plain = copy.deepcopy(BLOCKS[name]).to(dtype).eval()
    randomise_(plain)
    block = fused(plain)
    padded = torch.zeros(2, 1, 7, 9, dtype=torch.bool)
    padded[1, :, 5:] = True
    for count, padding in ((1, None), (1, padded[1:]), (2, padded)):
        x = torch.randn(count, 4, 7, 9, dtype=dtype)
        token = torch.randn(count, 8, dtype=dtype)
        if count == 1:
            x = x.contiguous(memory_format=torch.channels_last)
        before = x.clone()
        convolve.reset_mock()
        with torch.no_grad():
            assert_close(run(block, x, token, padding), run(plain, x, token, padding))
        assert_close(x, before, rtol=0, atol=0)
        assert convolve.called is (count == 1 and padding is None)


def test_lite_bottlenecks_with_norms_or_without_identity_stay_plain():
    model = nn.Sequential(
        LiteBottleneck(in_channels=4, hidden=12, out_channels=4, norm="BN"),
        LiteBottleneck(in_channels=4, hidden=12, out_channels=6, norm=""),
    )
    optimize(model, "cpu_inference")
    assert count_fast_layers(model) == 0


def test_gradients_pass_through_a_fused_block():
    plain = copy.deepcopy(BLOCKS["mobile"]).double().eval()
    randomise_(plain)
    x = torch.randn(1, 4, 7, 9, dtype=torch.float64, requires_grad=True)
    token = torch.randn(1, 8, dtype=torch.float64)
    gradients = [
        torch.autograd.grad(block(x, token).square().sum(), x) for block in (plain, fused(plain))
    ]
    assert_close(*gradients)


def test_slopes_of_zero_are_not_divided_by():
    plain = copy.deepcopy(BLOCKS["mobile"]).eval()
    randomise_(plain)
    for act in (plain.expand_act, plain.depthwise_act):
        nn.init.constant_(act.slopes.bias, -9.0)  # slopes 0 and -1
    x = torch.randn(1, 4, 7, 9)
    token = torch.randn(1, 8)
    with torch.no_grad():
        assert_close(fused(plain)(x, token), plain(x, token))


def test_activations_inside_a_fused_block_are_fast_too():
    modules = list(fused(BLOCKS["mobile"]).modules())
    assert sum(isinstance(module, TwoSlopeReLU) for module in modules) == 2
    assert not any(type(module) is DynamicReLU for module in modules)
