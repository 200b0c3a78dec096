# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Attention against the formula, and the record of attention weights."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from qbheat_det.layers import (
    DotProductAttention,
    MapAttention,
    MobileToFormer,
    padding_mask,
    read_attention,
)
from qbheat_det.modeling.backbone import MobileFormer

from ..modeling.tiny_pretraining import SMALL_ARCH


def draw(num_queries, num_keys):
    lengths = (num_queries, num_keys, num_keys)
    shapes = [(2, 4, length, 3) for length in lengths]
    parts = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    return tuple(parts)


def formula(query, key, value, hidden):
    logits = torch.einsum("nhqd,nhld->nhql", query, key) / query.shape[-1] ** 0.5
    weights = (logits - 1e30 * hidden).softmax(dim=-1)
    return torch.einsum("nhql,nhld->nqhd", weights, value).flatten(2)


def test_dot_product_attention_equals_the_formula_with_its_gradients():
    torch.manual_seed(0)
    tensors = draw(5, 9)
    hidden = torch.rand(2, 1, 1, 9) < 0.3
    hidden[..., 0] = False
    attended = DotProductAttention()(*tensors, masked=hidden)
    expected = formula(*tensors, hidden)
    assert_close(attended, expected)
    above = torch.randn_like(attended)
    gradients = torch.autograd.grad(attended, tensors, above)
    assert_close(gradients, torch.autograd.grad(expected, tensors, above))


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
    output = ours(query, memory + 1, memory, **masks)
    expected, weights = theirs(query, memory + 1, memory, average_attn_weights=False, **masks)
    assert_close(output, expected)
    with read_attention(ours) as outer, read_attention(nn.ModuleList([ours])) as record:
        assert_close(ours(query, memory + 1, memory, **masks), expected)
    for (read,) in (outer[""], record["0"]):
        assert_close(read, weights)


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
