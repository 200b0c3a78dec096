# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Attention read out of a model's own forward pass, against sums, naive loops and itself."""

import pytest
import torch
from timm.models.vision_transformer import Block
from torch import Tensor, nn
from torch.testing import assert_close

from qbheat_det.layers import MobileToFormer, padding_mask, read_attention
from qbheat_det.modeling.backbone import MobileFormer
from qbheat_det.modeling.backbone.mobile_former_archs import BlockSpec, MobileFormerArch

SIZES = torch.tensor([(5, 4), (1, 1), (3, 6), (2, 1)])
TINY = MobileFormerArch(
    num_tokens=3,
    token_dim=8,
    stem=4,
    blocks=(BlockSpec("lite", 8, 4), BlockSpec("down", 8, 6, 12), BlockSpec("plain", 12, 6)),
    expanded=8,
)


def count_hooks(model: nn.Module) -> int:
    return sum(
        len(getattr(module, name, ()))
        for module in model.modules()
        for name in ("_forward_hooks", "_forward_pre_hooks", "watchers")
    )


@pytest.fixture
def backbone() -> MobileFormer:
    return MobileFormer(arch=TINY, out_features=("s4", "tokens")).eval()


def test_tokens_read_pixels_with_weights_that_make_the_output() -> None:
    bridge = MobileToFormer(token_dim=16, channels=12).double()
    x, tokens = torch.randn(4, 12, 5, 6).double(), torch.randn(4, 6, 16).double()
    with read_attention(bridge) as maps:
        output = bridge(tokens, x)
    (read,) = maps[""]
    assert read.weights.shape == (4, 2, 6, 30)
    assert read.size == (5, 6)
    assert read.unflatten().shape == (4, 2, 6, 5, 6)
    assert_close(read.weights.sum(dim=-1), torch.ones(4, 2, 6).double())
    gathered = torch.zeros(4, 6, 12).double()
    for image in range(4):
        for head in range(2):
            own = slice(6 * head, 6 * head + 6)
            for token in range(6):
                for pixel in range(30):
                    weight = read.weights[image, head, token, pixel]
                    gathered[image, token, own] += weight * x[image, own].flatten(1)[:, pixel]
    gate = 2 * nn.functional.hardsigmoid(bridge.gate(tokens))
    assert_close(output, bridge.norm(tokens + bridge.project(gate * gathered)))


def test_padding_gets_no_attention_and_the_rest_is_that_of_the_image_alone() -> None:
    bridge = MobileToFormer(token_dim=16, channels=12).double()
    x, tokens = torch.randn(4, 12, 5, 6).double(), torch.randn(4, 6, 16).double()
    with read_attention(bridge) as maps:
        bridge(tokens, x, padding_mask(SIZES, (5, 6)))
        for n, (height, width) in enumerate(SIZES.tolist()):
            bridge(tokens[n : n + 1], x[n : n + 1, :, :height, :width])
    batch, *alone = maps[""]
    for n, (height, width) in enumerate(SIZES.tolist()):
        seen = batch.unflatten()[n, :, :, :height, :width]
        assert_close(seen, alone[n].unflatten()[0])
        assert_close(batch.weights[n].sum(), seen.sum(), rtol=0, atol=1e-12)


def test_the_hooks_are_gone_even_after_an_error(backbone: MobileFormer) -> None:
    assert count_hooks(backbone) == 0
    with read_attention(backbone):
        assert count_hooks(backbone) == 4
    with pytest.raises(RuntimeError), read_attention(backbone):
        backbone(torch.zeros(1, 5, 16, 16))
    assert count_hooks(backbone) == 0


def naive_weights(attention: nn.MultiheadAttention, query: Tensor, key: Tensor) -> Tensor:
    dim, heads = attention.embed_dim, attention.num_heads
    q, k = attention.in_proj_weight[: 2 * dim].split(dim)
    bias_q, bias_k = attention.in_proj_bias[: 2 * dim].split(dim)
    query = (query @ q.T + bias_q).unflatten(-1, (heads, -1)).transpose(1, 2)
    key = (key @ k.T + bias_k).unflatten(-1, (heads, -1)).transpose(1, 2)
    return (query @ key.transpose(-2, -1) / (dim // heads) ** 0.5).softmax(dim=-1)


def test_multihead_attention_answers_its_caller_as_asked_and_the_reader_in_full() -> None:
    attention = nn.MultiheadAttention(8, 2, batch_first=True).double().eval()
    nn.init.normal_(attention.in_proj_bias)
    query, memory = torch.randn(3, 4, 8).double(), torch.randn(3, 5, 8).double()
    ways = [
        {"need_weights": False},
        {"need_weights": True},
        {"need_weights": True, "average_attn_weights": False},
    ]
    expected = naive_weights(attention, query, memory)
    for way in ways:
        plain = attention(query, memory, memory, **way)
        with read_attention(attention) as outer, read_attention(attention) as inner:
            read = attention(query, memory, memory, **way)
        assert_close(read[0], plain[0])
        assert (read[1] is None) == (plain[1] is None)
        if plain[1] is not None:
            assert_close(read[1], plain[1])
        for maps in (outer, inner):
            assert_close(maps[""][0].weights, expected)
            assert maps[""][0].size is None
    # Fourth and fifth by place: key_padding_mask, need_weights.
    ignored = torch.zeros(3, 5, dtype=torch.bool)
    ignored[:, 3:] = True
    with read_attention(attention) as maps:
        assert attention(query, memory, memory, ignored, False)[1] is None
    assert_close(maps[""][0].weights[..., 3:], torch.zeros(3, 2, 4, 2).double())
    assert_close(maps[""][0].weights[..., :3], naive_weights(attention, query, memory[:, :3]))


def test_blocks_of_timm_are_read_and_left_as_they_were() -> None:
    model = nn.Sequential(Block(8, 2), Block(8, 2)).double().eval()
    x = torch.randn(2, 5, 8).double()
    plain, fused = model(x), [block.attn.fused_attn for block in model]
    with read_attention(model) as outer, read_attention(model) as maps:
        assert_close(model(x), plain)
    assert list(maps) == ["0.attn", "1.attn"]
    assert_close(outer["0.attn"][0].weights, maps["0.attn"][0].weights)
    assert_close(maps["1.attn"][0].weights.sum(dim=-1), torch.ones(2, 2, 5).double())
    assert [block.attn.fused_attn for block in model] == fused
    assert count_hooks(model) == 0
