# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Attention against the formula; dropout and linear layers on the CPU."""

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from timm.models.vision_transformer import Block
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

from qbheat_det.layers import (
    Dropout,
    Linear,
    MapAttention,
    MobileToFormer,
    cpu_kernels,
    linear,
    padding_mask,
    read_attention,
    replace_linear_layers,
)
from qbheat_det.layers.attention import attend
from qbheat_det.layers.cpu_kernels import draw_kept, rounded
from qbheat_det.modeling.backbone import MobileFormer

from ..modeling.tiny_pretraining import SMALL_ARCH


def draw(num_queries: int, num_keys: int) -> tuple[Tensor, Tensor, Tensor]:
    lengths = (num_queries, num_keys, num_keys)
    shapes = [(2, 4, length, 3) for length in lengths]
    parts = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    return tuple(parts)  # type: ignore[return-value]


def formula(query: Tensor, key: Tensor, value: Tensor, hidden: Tensor, factor: Tensor) -> Tensor:
    logits = torch.einsum("nhqd,nhld->nhql", query, key) / query.shape[-1] ** 0.5
    weights = (logits - 1e30 * hidden).softmax(dim=-1) * factor
    return torch.einsum("nhql,nhld->nqhd", weights, value).flatten(2)


def test_attention_with_dropout_equals_the_formula_with_its_gradients() -> None:
    torch.manual_seed(0)
    tensors = draw(5, 9)
    hidden = torch.rand(2, 1, 1, 9) < 0.3
    hidden[..., 0] = False
    state = torch.get_rng_state()
    found = attend(*tensors, masked=hidden, dropout=0.25)
    torch.set_rng_state(state)
    kept = draw_kept((2, 4, 5, 9), 0.25)
    wanted = formula(*tensors, hidden, kept / 0.75)
    assert_close(found, wanted)
    above = torch.randn_like(found)
    for ours, theirs in zip(
        torch.autograd.grad(found, tensors, above),
        torch.autograd.grad(wanted, tensors, above),
        strict=True,
    ):
        assert_close(ours, theirs)


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
def test_attention_without_dropout_equals_pytorchs(masked: bool) -> None:
    torch.manual_seed(0)
    ours = MapAttention(dim=16, num_heads=4)
    nn.init.normal_(ours.in_proj_bias)
    theirs = nn.MultiheadAttention(16, 4, batch_first=True)
    theirs.load_state_dict(ours.state_dict())
    query, memory = torch.randn(2, 5, 16), torch.randn(2, 7, 16)
    masks: dict[str, Any] = {}
    if masked:
        hidden = torch.rand(8, 5, 7) < 0.5
        hidden[..., 0] = False
        padding = torch.arange(7).expand(2, -1) >= torch.tensor([[7], [4]])
        masks = {"attn_mask": hidden, "key_padding_mask": padding}
    found = ours(query, memory + 1, memory, **masks)
    wanted, weights = theirs(query, memory + 1, memory, average_attn_weights=False, **masks)
    assert_close(found, wanted)
    with read_attention(ours) as outer, read_attention(nn.ModuleList([ours])) as record:
        assert_close(ours(query, memory + 1, memory, **masks), wanted)
    for (read,) in (outer[""], record["0"]):
        assert_close(read, weights)


def test_exported_attention_among_positions_is_pytorchs_kernel() -> None:
    x = torch.randn(1, 20, 8)
    for fused in (False, True):
        layer = MapAttention(dim=8, num_heads=2, fused=fused).eval()
        program = torch.export.export(Alone(layer), (x,))
        kernels = [node for node in program.graph.nodes if "dot_product" in str(node.target)]
        assert len(kernels) == fused
        assert_close(program.module()(x), Alone(layer)(x))


class Alone(nn.Module):
    def __init__(self, layer: MapAttention) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x, x, x)
        return found


def count_watchers(model: nn.Module) -> int:
    return sum(len(getattr(module, "watchers", ())) for module in model.modules())


def test_recorded_attention_of_a_bridge_reproduces_its_output() -> None:
    bridge = MobileToFormer(token_dim=16, channels=12).double()
    x, tokens = torch.randn(4, 12, 5, 6).double(), torch.randn(4, 6, 16).double()
    with read_attention(bridge) as maps:
        output = bridge(tokens, x)
        bridge(tokens, x, padding_mask(torch.tensor([(5, 4)] * 4), (5, 6)))
    read, padded = maps[""]
    assert padded[..., 4:].count_nonzero() == 0
    assert read.shape == (4, 2, 6, 5, 6)
    assert_close(read.sum(dim=(-2, -1)), torch.ones(4, 2, 6).double())
    by_head = x.unflatten(1, (2, 6))
    gathered = torch.einsum("nhmyx,nhcyx->nmhc", read, by_head).flatten(2)
    gate = 2 * nn.functional.hardsigmoid(bridge.gate(tokens))
    assert_close(output, bridge.norm(tokens + bridge.project(gate * gathered)))


def test_watchers_are_removed_even_after_an_error() -> None:
    backbone = MobileFormer(arch=SMALL_ARCH, out_features=("s4",)).eval()
    assert count_watchers(backbone) == 0
    with read_attention(backbone):
        assert count_watchers(backbone) == 2
    with pytest.raises(RuntimeError), read_attention(backbone):
        backbone(torch.zeros(1, 5, 16, 16))
    assert count_watchers(backbone) == 0


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_the_dropout_mask_has_its_rate_and_pytorchs_seed(rate: float) -> None:
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


def test_dropout_multiplies_by_its_mask_forward_and_backward() -> None:
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
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    return bool(request.param)


def counted(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Counts convolutions."""
    convolve = Mock(side_effect=F.conv2d)
    monkeypatch.setattr(F, "conv2d", convolve)
    return convolve


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("shape", [(64, 8), (2, 9, 7, 8)])
def test_linear_equals_the_formula_with_its_gradients(
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


def test_linear_layers_are_convolutions_only_for_many_rows_of_float32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu_kernels, "prefers_convolutions", lambda: True)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    convolve = counted(monkeypatch)
    for rows, dtype in ((63, torch.float32), (64, torch.float64), (64, torch.bfloat16)):
        linear(torch.zeros(rows, 8, dtype=dtype), torch.zeros(5, 8, dtype=dtype))
    assert not convolve.called
    linear(torch.zeros(64, 8), torch.zeros(5, 8))
    assert convolve.call_count == 1
    layer, x = Linear(8, 5).eval(), torch.randn(64, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    torch.jit.trace(layer, x, check_trace=False)
    program = torch.export.export(layer, (x,), strict=False)
    with monkeypatch.context() as one_thread:
        one_thread.setattr(torch, "get_num_threads", lambda: 1)
        linear(torch.zeros(64, 8), torch.zeros(5, 8))
    assert convolve.call_count == 1
    assert "conv" not in str(program.graph)
    assert_close(program.module()(x), F.linear(x, layer.weight, layer.bias))


def test_replaced_linear_layers_keep_parameters_and_results(preferred: bool) -> None:
    torch.manual_seed(0)
    block = Block(16, 2).eval()
    x = torch.randn(2, 40, 16)
    wanted, state = block(x), {key: each.clone() for key, each in block.state_dict().items()}
    replace_linear_layers(block)
    assert {type(each) for each in block.modules() if isinstance(each, nn.Linear)} == {Linear}
    assert_close(block(x), wanted)
    assert_close(block.state_dict(), state)
