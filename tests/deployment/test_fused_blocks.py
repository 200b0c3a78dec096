# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Fused inference blocks against the plain blocks; BatchNorm folded into convolutions."""

import copy
from unittest.mock import Mock

import pytest
import torch
from detectron2.layers import Conv2d, FrozenBatchNorm2d
from timm.layers import BatchNormAct2d
from torch import nn
from torch.testing import assert_close

from qbheat_det.deployment import fused_blocks
from qbheat_det.deployment.fused_blocks import FUSED_BLOCKS, fold_batch_norms, fuse_blocks
from qbheat_det.export.graph import trace
from qbheat_det.layers import DownMobile, LiteBottleneck, MapAttention, Mobile, SinePositionEncoding
from qbheat_det.layers.cpu_kernels import recorded_as
from qbheat_det.modeling.detr.decoder_block import DecoderWidths, LevelMap, LiteMobile
from tests.export.tiny_models import build, make_config
from tests.modeling.reference_mobile_former import randomise_

SHAPES = {"token_dim": 8, "norm": "BN"}
BLOCKS = {
    "lite": LiteBottleneck(in_channels=4, hidden=12, out_channels=4, norm=""),
    "lite with a norm": LiteBottleneck(in_channels=4, hidden=12, out_channels=4, norm="BN"),
    "mobile": Mobile(in_channels=4, hidden=10, out_channels=4, **SHAPES),
    "wider": Mobile(in_channels=4, hidden=10, out_channels=6, **SHAPES),
    "down": DownMobile(in_channels=4, hidden=12, out_channels=6, second_hidden=18, **SHAPES),
    "lite of the decoder": LiteMobile(DecoderWidths(dim=8, num_heads=2, expansion=3)),
}


def fused(block):
    holder = nn.Sequential(copy.deepcopy(block))
    assert fuse_blocks(holder) == 1
    assert type(holder[0]) is FUSED_BLOCKS[type(block)]
    return holder[0]


def run(block, x, token, padding):
    if LiteMobile in (type(block), type(getattr(block, "plain", None))):
        encoding = SinePositionEncoding(channels=8)(x.shape[-2:], padding)
        rows = torch.cat([x, x], dim=1).flatten(2).transpose(1, 2).contiguous()
        found = block(LevelMap(rows, encoding, x.shape[-2:], padding), token[:, None])
    else:
        found = block(x, token, padding)
    return found[0] if isinstance(found, tuple) else found


class OnMap(nn.Module):
    """Runs a block on a map and a token."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x, token):
        return run(self.block, x, token, None)


@pytest.mark.parametrize("name", [name for name in BLOCKS if "norm" not in name])
@pytest.mark.parametrize("form", ["float", "int8"])
def test_a_graph_for_single_images_equals_the_plain_block(name, form):
    torch.manual_seed(0)
    plain = copy.deepcopy(BLOCKS[name]).eval()
    randomise_(plain)
    holder = nn.Sequential(copy.deepcopy(plain))
    fold_batch_norms(holder)
    fuse_blocks(holder)
    found = OnMap(holder[0])
    x, token = torch.randn(1, 4, 7, 9), torch.randn(1, 8)
    program = trace(found, (x, token), (None, None), int8=form == "int8")
    with torch.no_grad():
        assert_close(program.module()(x, token), run(plain, x, token, None), rtol=1e-4, atol=1e-4)
    # Only the weights of the float form depend on the image.
    names = {**program.graph_signature.inputs_to_parameters}
    nodes = [n for n in program.graph.nodes if n.target is torch.ops.aten.conv2d.default]
    constant = [str(node.args[1]) in names for node in nodes]
    assert all(constant) if form == "int8" else not all(constant)


@pytest.mark.parametrize("form", ["float", "int8"])
@pytest.mark.parametrize("is_padded", [False, True])
def test_attention_in_a_graph_equals_the_layer(form, is_padded):
    torch.manual_seed(0)
    layer = MapAttention(dim=8, num_heads=2).eval()
    nn.init.normal_(layer.in_proj_bias)
    inputs = torch.randn(2, 3, 8), torch.randn(2, 20, 8), torch.randn(2, 20, 8)
    padding = torch.rand(2, 20) > 0.5 if is_padded else None
    program = trace(layer, (*inputs, padding), (None,) * 4, int8=form == "int8")
    with torch.no_grad():
        assert_close(program.module()(*inputs, padding), layer(*inputs, padding))


@pytest.mark.parametrize("count", [1, 2])
def test_the_form_of_programs_in_bfloat16_equals_the_model(count, monkeypatch):
    turns = Mock(side_effect=fused_blocks.convolve_by_turns)
    monkeypatch.setattr(fused_blocks, "convolve_by_turns", turns)
    torch.manual_seed(0)
    model = build(make_config("mf_detr")).double()
    randomise_(model)
    x = torch.randn(count, 3, 96, 64, dtype=torch.float64).to(memory_format=torch.channels_last)
    with torch.no_grad():
        features = [model.backbone(x)[name] for name in model.in_features]
        expected = features, model.decoder(features)
        folded, left = fold_batch_norms(model)
        assert folded > 10 > left == 0
        fuse_blocks(model)
        with recorded_as("bfloat16"):
            found = [model.backbone(x)[name] for name in model.in_features]
            assert_close((found, model.decoder(features)), expected)
    assert turns.called


@pytest.mark.parametrize("name", BLOCKS)
def test_a_fused_block_equals_the_plain_one(name, monkeypatch):
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


def test_slopes_of_zero_are_not_divided_by():
    plain = Mobile(in_channels=4, hidden=10, out_channels=4, **SHAPES).eval()
    randomise_(plain)
    for act in (plain.expand_act, plain.depthwise_act):
        nn.init.constant_(act.slopes.bias, -9.0)  # slopes 0 and -1
    x, token = torch.randn(1, 4, 7, 9), torch.randn(1, 8)
    with torch.no_grad():
        assert_close(fused(plain)(x, token), plain(x, token))


def test_position_encodings_are_computed_once_for_each_of_the_last_sizes():
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


def own_norm(norm, bias):
    return Conv2d(3, 6, 3, padding=1, bias=bias, groups=3, norm=norm)


@pytest.mark.parametrize(
    "net",
    [
        own_norm(nn.BatchNorm2d(6, eps=0.1), False),
        own_norm(FrozenBatchNorm2d(6), True),
        nn.Sequential(nn.Conv2d(3, 6, 3, stride=2), nn.BatchNorm2d(6), nn.ReLU()),
    ],
)
def test_a_folded_pair_equals_the_two_layers(net):
    net = copy.deepcopy(net).double().eval()
    randomise_(net)
    x = torch.randn(2, 3, 9, 11, dtype=torch.float64)
    expected = net(x)
    assert fold_batch_norms(net) == (1, 0)
    assert_close(net(x), expected, rtol=1e-12, atol=1e-12)
    assert not any(isinstance(m, nn.BatchNorm2d | FrozenBatchNorm2d) for m in net.modules())


def test_shared_convolutions_and_norms_that_do_more_are_not_folded():
    shared = nn.Conv2d(4, 4, 1)
    net = nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 4, 1), BatchNormAct2d(4)),
        nn.Sequential(shared, nn.BatchNorm2d(4)),
        nn.Sequential(shared, nn.BatchNorm2d(4)),
        Conv2d(4, 4, 1, norm=nn.GroupNorm(2, 4)),
        nn.Sequential(Conv2d(4, 4, 1, activation=torch.relu), nn.BatchNorm2d(4)),
        nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4, track_running_stats=False)),
    ).eval()
    randomise_(net)
    x = torch.randn(2, 3, 5, 5)
    expected = net(x)
    assert fold_batch_norms(net) == (0, 4)
    assert_close(net(x), expected, rtol=0, atol=0)
