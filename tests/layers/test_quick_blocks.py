# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Blocks with fewer passes, against the plain blocks."""

import copy
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from qbheat_det.layers import DownMobile, LiteBottleneck, Mobile, SinePositionEncoding, quick_blocks
from qbheat_det.layers.quick_blocks import QUICK_BLOCKS, quicken_blocks
from qbheat_det.modeling.detr import quick_lite_mobile
from qbheat_det.modeling.detr.decoder_block import DecoderWidths, LevelMap, LiteMobile
from tests.modeling.parameter_names import randomise_

SHAPES = {"token_dim": 8, "norm": "BN"}
BLOCKS: dict[str, nn.Module] = {
    "lite": LiteBottleneck(channels=4, hidden=12, norm=""),
    "lite with a norm": LiteBottleneck(channels=4, hidden=12, norm="BN"),
    "mobile": Mobile(in_channels=4, hidden=10, out_channels=4, **SHAPES),
    "wider": Mobile(in_channels=4, hidden=10, out_channels=6, **SHAPES),
    "down": DownMobile(in_channels=4, hidden=12, out_channels=6, second_hidden=18, **SHAPES),
    "lite of the decoder": LiteMobile(DecoderWidths(dim=8, num_heads=2, expansion=3)),
}


def run(block: nn.Module, x: Tensor, token: Tensor, padding: Tensor | None) -> Tensor:
    if isinstance(block, LiteMobile):
        encoding = SinePositionEncoding(channels=8)(x.shape[-2:], padding)
        rows = torch.cat([x, x], dim=1).flatten(2).transpose(1, 2).contiguous()
        found = block(LevelMap(rows, encoding, x.shape[-2:], padding), token[:, None])
    else:
        found = block(x, token, padding)
    return found[0] if isinstance(found, tuple) else found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", BLOCKS)
def test_a_quick_block_gives_what_the_plain_one_gives(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    convolve = Mock(side_effect=quick_blocks.convolve)  # which plain blocks do not call
    for module in (quick_blocks, quick_lite_mobile):
        monkeypatch.setattr(module, "convolve", convolve)
    torch.manual_seed(0)
    plain = copy.deepcopy(BLOCKS[name]).to(dtype).eval()
    randomise_(plain)
    quick = copy.deepcopy(plain)
    assert quicken_blocks(quick) == 1
    assert type(quick) is QUICK_BLOCKS[type(plain)]
    assert [*quick.state_dict()] == [*plain.state_dict()]
    hidden = torch.zeros(2, 1, 7, 9, dtype=torch.bool)
    hidden[1, :, 5:] = True
    for count, padding in ((1, None), (1, hidden[1:]), (2, hidden)):
        x, token = torch.randn(count, 4, 7, 9, dtype=dtype), torch.randn(count, 8, dtype=dtype)
        if count == 1:
            x = x.contiguous(memory_format=torch.channels_last)
        kept = x.clone()
        convolve.reset_mock()
        with torch.no_grad():
            assert_close(run(quick, x, token, padding), run(plain, x, token, padding))
        assert_close(x, kept, rtol=0, atol=0)
        is_quick = count == 1 and padding is None and name != "lite with a norm"
        assert convolve.called is is_quick


def test_slopes_of_zero_are_no_division_by_zero() -> None:
    plain = Mobile(in_channels=4, hidden=10, out_channels=4, **SHAPES).eval()
    randomise_(plain)
    for act in (plain.expand_act, plain.depthwise_act):
        nn.init.constant_(act.slopes.bias, -9.0)  # 0 and -1
    quick = copy.deepcopy(plain)
    quicken_blocks(quick)
    x, token = torch.randn(1, 4, 7, 9), torch.randn(1, 8)
    with torch.no_grad():
        assert_close(quick(x, token), plain(x, token))


def test_codes_of_positions_are_worked_out_once_for_each_of_the_last_sizes() -> None:
    plain = SinePositionEncoding(channels=8)
    quick = copy.deepcopy(plain)
    assert quicken_blocks(quick) == 1
    padding = torch.zeros(1, 1, 3, 5, dtype=torch.bool)
    with torch.no_grad():
        first = quick((3, 5))
        assert_close(first, plain((3, 5)), rtol=0, atol=0)
        assert quick((3, 5)) is first
        assert_close(quick((5, 3)), plain((5, 3)), rtol=0, atol=0)
        assert_close(quick((3, 5), padding), plain((3, 5), padding), rtol=0, atol=0)
        for width in range(6, 11):  # five more, between which it was asked for again
            assert quick((3, 5)) is first
            quick((3, width))
        for width in range(11, 17):
            quick((3, width))
        assert len(quick._codes) == 6
        assert quick((3, 5)) is not first
    assert quick((3, 5)) is not quick((3, 5))  # with gradients, as ever
    assert quick.to(torch.float64)((3, 5)).dtype == torch.float64
