# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Attention against the formula; dropout and linear layers on the CPU."""

from unittest.mock import Mock

import pytest
import torch
from timm.models.vision_transformer import Block
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from qbheat_det.layers import (
    Dropout,
    Linear,
    MapAttention,
    MobileToFormer,
    attention,
    cpu_kernels,
    linear,
    padding_mask,
    read_attention,
    replace_linear_layers,
)
from qbheat_det.layers.attention import attend
from qbheat_det.layers.cpu_kernels import draw_kept
from qbheat_det.modeling.backbone import MobileFormer

from ..modeling.tiny_pretraining import SMALL_ARCH


def draw(num_queries, num_keys):
    lengths = (num_queries, num_keys, num_keys)
    shapes = [(2, 4, length, 3) for length in lengths]
    parts = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    return tuple(parts)


def formula(query, key, value, hidden, factor):
    logits = torch.einsum("nhqd,nhld->nhql", query, key) / query.shape[-1] ** 0.5
    weights = (logits - 1e30 * hidden).softmax(dim=-1) * factor
    return torch.einsum("nhql,nhld->nqhd", weights, value).flatten(2)


@pytest.mark.parametrize("part", [1, 100], ids=["by head", "by two heads"])
def test_attention_with_dropout_equals_the_formula_with_its_gradients(part, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(attention, "_PART", part)
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


def test_attention_in_bfloat16_uses_matrix_products_and_comes_near_the_formula(monkeypatch):
    torch.manual_seed(0)
    tensors = draw(5, 9)
    wanted = formula(*tensors, torch.zeros(9), torch.ones(()))
    fused = Mock(wraps=attention.F.scaled_dot_product_attention)
    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", fused)
    found = attend(*(each.bfloat16() for each in tensors))
    assert not fused.called
    for ours, theirs in zip(
        (found, *torch.autograd.grad(found.double().square().sum(), tensors)),
        (wanted, *torch.autograd.grad(wanted.square().sum(), tensors)),
        strict=True,
    ):
        assert_close(ours.double(), theirs, rtol=0, atol=0.02 * float(theirs.detach().abs().max()))
    monkeypatch.setattr(attention, "_PART", 4 * 5 * 9 - 1)  # too many weights to store
    attend(*(each.bfloat16() for each in tensors))
    assert fused.called


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
def test_attention_without_dropout_equals_pytorchs(masked):
    torch.manual_seed(0)
    ours = MapAttention(dim=16, num_heads=4)
    nn.init.normal_(ours.in_proj_bias)
    theirs = nn.MultiheadAttention(16, 4, batch_first=True)
    theirs.load_state_dict(ours.state_dict())
    query, memory = torch.randn(2, 5, 16), torch.randn(2, 7, 16)
    masks = {}
    if masked:
        padding = torch.arange(7).expand(2, -1) >= torch.tensor([[7], [4]])
        masks = {"key_padding_mask": padding}
    found = ours(query, memory + 1, memory, **masks)
    wanted, weights = theirs(query, memory + 1, memory, average_attn_weights=False, **masks)
    assert_close(found, wanted)
    with read_attention(ours) as outer, read_attention(nn.ModuleList([ours])) as record:
        assert_close(ours(query, memory + 1, memory, **masks), wanted)
    for (read,) in (outer[""], record["0"]):
        assert_close(read, weights)


def test_exported_attention_among_positions_is_pytorchs_kernel():
    x = torch.randn(1, 20, 8)
    for fused in (False, True):
        layer = MapAttention(dim=8, num_heads=2, fused=fused).eval()
        program = torch.export.export(Alone(layer), (x,))
        kernels = [node for node in program.graph.nodes if "dot_product" in str(node.target)]
        assert len(kernels) == fused
        assert_close(program.module()(x), Alone(layer)(x))


class Alone(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x, x, x)


def count_watchers(model):
    return sum(len(getattr(module, "watchers", ())) for module in model.modules())


def test_recorded_attention_of_a_bridge_reproduces_its_output():
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


def test_watchers_are_removed_even_after_an_error():
    backbone = MobileFormer(arch=SMALL_ARCH, out_features=("s4",)).eval()
    assert count_watchers(backbone) == 0
    with read_attention(backbone):
        assert count_watchers(backbone) == 2
    with pytest.raises(RuntimeError), read_attention(backbone):
        backbone(torch.zeros(1, 5, 16, 16))
    assert count_watchers(backbone) == 0


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_dropout_multiplies_by_a_mask_of_its_rate_and_pytorchs_seed(rate):
    x, layer = torch.randn(300, 1010, requires_grad=True), Dropout(rate)
    torch.manual_seed(0)
    found = layer(x)
    assert not torch.equal(layer(x), found)
    torch.manual_seed(0)
    kept = draw_kept(x.shape, rate)
    assert set(kept.unique().tolist()) == {0, 1}
    assert_close(kept.double().mean().item(), 1 - rate, rtol=0, atol=0.005)
    assert_close(found, x * kept / (1 - rate), rtol=1e-4, atol=0)
    (gradient,) = torch.autograd.grad(found.sum(), x)
    assert_close(gradient, kept / (1 - rate), rtol=1e-4, atol=0)


@pytest.mark.parametrize("convolves", [True, False])
def test_linear_layers_and_their_gradients_are_pytorchs(convolves, monkeypatch):
    monkeypatch.setattr(cpu_kernels, "prefers_convolutions", lambda: convolves)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    convolve = Mock(side_effect=F.conv2d)
    monkeypatch.setattr(F, "conv2d", convolve)
    torch.manual_seed(0)
    block = Block(16, 2).eval()
    x = torch.randn(2, 40, 16, requires_grad=True)
    state = {key: value.clone() for key, value in block.state_dict().items()}
    results = []
    for _ in range(2):
        y = block(x)
        gradients = torch.autograd.grad(y.square().sum(), [x, *block.parameters()])
        results.append([y, *gradients])
        replace_linear_layers(block)
    assert_close(*results)
    assert_close(block.state_dict(), state)
    assert {type(each) for each in block.modules() if isinstance(each, nn.Linear)} == {Linear}
    assert convolve.call_count == 4 * convolves
    for rows, dtype in ((63, torch.float32), (64, torch.float64), (64, torch.bfloat16)):
        linear(torch.zeros(rows, 8, dtype=dtype), torch.zeros(5, 8, dtype=dtype))
    assert convolve.call_count == 4 * convolves  # few rows, or another type
    layer = Linear(8, 5).eval()
    program = torch.export.export(layer, (torch.randn(64, 8),), strict=False)
    assert "conv" not in str(program.graph)
