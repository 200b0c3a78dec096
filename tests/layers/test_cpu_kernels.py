# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Dropout whose masks are drawn in 16-bit numbers; linear layers of many rows by either library."""

import pytest
import torch
from timm.models.vision_transformer import Block
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

from qbheat_det.layers import Dropout, Linear, cpu_kernels, linear, replace_linear_layers
from qbheat_det.layers.cpu_kernels import draw_kept, rounded


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_as_many_numbers_are_dropped_as_asked_for_by_pytorchs_seed(
    rate: float,
) -> None:
    torch.manual_seed(0)
    kept = draw_kept((3, 8, 100, 101), rate)
    assert kept.dtype == torch.int8
    assert kept.shape == (3, 8, 100, 101)
    assert set(kept.unique().tolist()) == {0, 1}
    assert_close(kept.double().mean().item(), 1 - rate, rtol=0, atol=0.005)
    assert_close(rounded(rate), rate, rtol=0, atol=1e-5)
    assert not torch.equal(draw_kept(kept.shape, rate), kept)
    torch.manual_seed(0)
    assert_close(draw_kept(kept.shape, rate), kept)


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


@pytest.fixture(params=[True, False], ids=["convolutions", "products"])
def preferred(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(cpu_kernels, "prefers_convolutions", lambda: request.param)
    return bool(request.param)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Returns a list that grows by the map's shape at each convolution."""
    seen: list[torch.Size] = []
    own = F.conv2d

    def convolve(x: Tensor, *others: Tensor | None) -> Tensor:
        seen.append(x.shape)
        return own(x, *others)

    monkeypatch.setattr(F, "conv2d", convolve)
    return seen


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("shape", [(64, 8), (2, 9, 7, 8)])
def test_results_and_gradients_are_those_of_the_formula(
    preferred: bool, shape: tuple[int, ...], with_bias: bool
) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape, requires_grad=True)
    weight = torch.randn(5, 8, requires_grad=True)
    bias = torch.randn(5, requires_grad=True) if with_bias else None
    wanted = torch.einsum("...c,oc->...o", x, weight)
    wanted = wanted if bias is None else wanted + bias
    found = linear(x, weight, bias)
    assert_close(found, wanted)
    assert found.is_contiguous()
    leaves = [x, weight] if bias is None else [x, weight, bias]
    above = torch.randn_like(wanted)
    assert_close(
        torch.autograd.grad(found, leaves, above), torch.autograd.grad(wanted, leaves, above)
    )


def test_convolutions_are_for_many_rows_of_float32_and_not_for_autocast_and_exporters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu_kernels, "prefers_convolutions", lambda: True)
    seen = counted(monkeypatch)
    for rows, dtype in ((63, torch.float32), (64, torch.float64), (64, torch.bfloat16)):
        linear(torch.zeros(rows, 8, dtype=dtype), torch.zeros(5, 8, dtype=dtype))
        assert not seen
    linear(torch.zeros(64, 8), torch.zeros(5, 8))
    assert seen == [torch.Size([1, 8, 64, 1])]

    monkeypatch.setattr(cpu_kernels, "prefers_convolutions", lambda: True)
    seen = counted(monkeypatch)
    layer, x = Linear(8, 5).eval(), torch.randn(64, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    torch.jit.trace(layer, x, check_trace=False)
    program = torch.export.export(layer, (x,), strict=False)
    assert not seen
    assert "conv" not in str(program.graph)
    assert_close(program.module()(x), F.linear(x, layer.weight, layer.bias))


def test_a_block_of_timm_keeps_its_parameters_and_results(preferred: bool) -> None:
    torch.manual_seed(0)
    block = Block(16, 2).eval()
    x = torch.randn(2, 40, 16)
    wanted, state = block(x), {key: each.clone() for key, each in block.state_dict().items()}
    replace_linear_layers(block)
    assert {type(each) for each in block.modules() if isinstance(each, nn.Linear)} == {Linear}
    assert_close(block(x), wanted)
    assert_close(block.state_dict(), state)
