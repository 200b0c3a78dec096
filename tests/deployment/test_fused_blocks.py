# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Fused inference blocks against the plain blocks."""

import copy
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from qbheat_det.deployment import fused_blocks
from qbheat_det.deployment.fused_blocks import FUSED_BLOCKS, fuse_blocks
from qbheat_det.layers import DownMobile, LiteBottleneck, Mobile, SinePositionEncoding
from qbheat_det.modeling.detr.decoder_block import DecoderWidths, LevelMap, LiteMobile
from tests.modeling.reference_mobile_former import randomise_

SHAPES = {"token_dim": 8, "norm": "BN"}
BLOCKS: dict[str, nn.Module] = {
    "lite": LiteBottleneck(in_channels=4, hidden=12, out_channels=4, norm=""),
    "lite with a norm": LiteBottleneck(in_channels=4, hidden=12, out_channels=4, norm="BN"),
    "mobile": Mobile(in_channels=4, hidden=10, out_channels=4, **SHAPES),
    "wider": Mobile(in_channels=4, hidden=10, out_channels=6, **SHAPES),
    "down": DownMobile(in_channels=4, hidden=12, out_channels=6, second_hidden=18, **SHAPES),
    "lite of the decoder": LiteMobile(DecoderWidths(dim=8, num_heads=2, expansion=3)),
}


def fused(block: nn.Module) -> nn.Module:
    holder = nn.Sequential(copy.deepcopy(block))
    assert fuse_blocks(holder) == 1
    assert type(holder[0]) is FUSED_BLOCKS[type(block)]
    return holder[0]


def run(block: nn.Module, x: Tensor, token: Tensor, padding: Tensor | None) -> Tensor:
    if LiteMobile in (type(block), type(getattr(block, "plain", None))):
        encoding = SinePositionEncoding(channels=8)(x.shape[-2:], padding)
        rows = torch.cat([x, x], dim=1).flatten(2).transpose(1, 2).contiguous()
        found = block(LevelMap(rows, encoding, x.shape[-2:], padding), token[:, None])
    else:
        found = block(x, token, padding)
    return found[0] if isinstance(found, tuple) else found


@pytest.mark.parametrize("name", BLOCKS)
def test_a_fused_block_gives_what_the_plain_one_gives(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    convolve = Mock(side_effect=fused_blocks.convolve)  # which plain blocks do not call
    monkeypatch.setattr(fused_blocks, "convolve", convolve)
    torch.manual_seed(0)
    dtype = torch.float64
    plain = copy.deepcopy(BLOCKS[name]).to(dtype).eval()
    randomise_(plain)
    block = fused(plain)
    padded = torch.zeros(2, 1, 7, 9, dtype=torch.bool)
    padded[1, :, 5:] = True
    for count, padding in ((1, None), (1, padded[1:]), (2, padded)):
        x, token = torch.randn(count, 4, 7, 9, dtype=dtype), torch.randn(count, 8, dtype=dtype)
        if count == 1:
            x = x.contiguous(memory_format=torch.channels_last)
        kept = x.clone()
        convolve.reset_mock()
        with torch.no_grad():
            assert_close(run(block, x, token, padding), run(plain, x, token, padding))
        assert_close(x, kept, rtol=0, atol=0)
        is_fused = count == 1 and padding is None and name != "lite with a norm"
        assert convolve.called is is_fused


def test_slopes_of_zero_are_not_divided_by() -> None:
    plain = Mobile(in_channels=4, hidden=10, out_channels=4, **SHAPES).eval()
    randomise_(plain)
    for act in (plain.expand_act, plain.depthwise_act):
        nn.init.constant_(act.slopes.bias, -9.0)  # slopes 0 and -1
    x, token = torch.randn(1, 4, 7, 9), torch.randn(1, 8)
    with torch.no_grad():
        assert_close(fused(plain)(x, token), plain(x, token))


def test_position_encodings_are_computed_once_for_each_of_the_last_sizes() -> None:
    plain = SinePositionEncoding(channels=8)
    cached = fused(plain)
    padding = torch.zeros(1, 1, 3, 5, dtype=torch.bool)
    with torch.no_grad():
        first = cached((3, 5))
        assert_close(first, plain((3, 5)), rtol=0, atol=0)
        assert_close(cached((5, 3)), plain((5, 3)), rtol=0, atol=0)
        assert_close(cached((3, 5), padding), plain((3, 5), padding), rtol=0, atol=0)
        for width in range(6, 11):  # five other sizes, between which the first one is used
            assert cached((3, 5)) is first
            cached((3, width))
        for width in range(11, 17):
            cached((3, width))
        assert cached((3, 5)) is not first
    assert cached((3, 5)) is not cached((3, 5))  # with gradients
    with torch.no_grad():
        assert cached.to(torch.float64)((3, 5)).dtype == torch.float64
