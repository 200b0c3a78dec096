# Copyright (c) qbheat_det contributors. Apache-2.0.
"""timm's networks as Detectron2 backbones: what they give, what is cut, what is frozen."""

import copy

import pytest
import timm
import torch
from detectron2.modeling import build_backbone
from timm.layers import Conv2dSame
from torch.export import Dim

from qbheat_det.config import get_cfg
from qbheat_det.core.errors import UserError
from qbheat_det.modeling.backbone import TimmBackbone
from qbheat_det.modeling.backbone.fpn import build_bare_backbone
from qbheat_det.modeling.backbone.timm_backbone import TraceableConv2dSame

NAMES = ("resnet18", "efficientnet_b0", "mobilenetv4_conv_small", "convnext_atto")
EVERY_STRIDE = ["s4", "s8", "s16", "s32"]


def _make_config(name, freeze_at=0):
    cfg = get_cfg()
    cfg.MODEL.BACKBONE.NAME = f"timm:{name}"
    cfg.MODEL.BACKBONE.FREEZE_AT = freeze_at
    return cfg


def test_relu6_keeps_its_output_alone_and_has_the_gradient_of_pytorchs():
    net = TimmBackbone(name="tf_efficientnet_lite0", out_features=["s8"]).net
    relu = next(module for module in net.modules() if isinstance(module, torch.nn.ReLU6))
    x = torch.tensor([-1.0, 0.0, 0.5, 6.0, 7.0, float("nan")], requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t, id):
        y = relu(x * 1)
    assert {y.data_ptr()} == {*saved}
    found, expected = relu(x * 1), torch.nn.functional.relu6(x * 1)
    torch.testing.assert_close(found, expected, equal_nan=True, rtol=0, atol=0)
    gradients = [torch.autograd.grad(out.nansum(), x)[0] for out in (found, expected)]
    torch.testing.assert_close(*gradients, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_maps_have_the_shapes_that_are_promised_and_equal_timms_own(name):
    backbone = TimmBackbone(name=name, out_features=EVERY_STRIDE).eval()
    whole = timm.create_model(name, features_only=True, feature_cls="getter").eval()
    state = {f"model.{key.removeprefix('net.')}": v for key, v in backbone.state_dict().items()}
    whole.load_state_dict(state)
    x = torch.randn(2, 3, 64, 96)
    with torch.no_grad():
        maps, expected = backbone(x), whole(x)[-4:]
    assert list(maps) == EVERY_STRIDE
    for (key, shape), other in zip(backbone.output_shape().items(), expected, strict=True):
        assert shape.stride == int(key[1:])
        assert maps[key].shape == (2, shape.channels, 64 // shape.stride, 96 // shape.stride)
        torch.testing.assert_close(maps[key], other, rtol=0, atol=0)
    assert backbone.size_divisibility == 32


@pytest.mark.parametrize("kernel", [3, 5])
def test_padding_gives_timms_maps_in_graphs_of_any_size_and_of_a_known_one(kernel, monkeypatch):
    plain = Conv2dSame(3, 4, kernel, stride=2)
    traceable = TraceableConv2dSame(3, 4, kernel, stride=2)
    traceable.load_state_dict(plain.state_dict())
    sides = {2: 2 * Dim("half_height", max=32), 3: 2 * Dim("half_width", max=32)}
    exported = torch.export.export(
        traceable, (torch.randn(1, 3, 16, 24),), dynamic_shapes=({**sides},)
    ).module()
    for size in ((16, 24), (30, 22)):
        x = torch.randn(1, 3, *size)
        torch.testing.assert_close(exported(x), plain(x))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    x = torch.randn(1, 3, 15, 21)  # the padding depends on the sides
    torch.testing.assert_close(traceable(x), plain(x), rtol=0, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_what_lies_behind_the_last_output_is_cut_and_the_rest_is_the_same(name):
    torch.manual_seed(0)
    short = TimmBackbone(name=name, out_features=["s8", "s16"]).eval()
    whole = TimmBackbone(name=name, out_features=EVERY_STRIDE).eval()
    assert len(short.state_dict()) < len(whole.state_dict())
    assert short.load_state_dict(whole.state_dict(), strict=False).missing_keys == []
    cut = set(whole.state_dict()) - set(short.state_dict())
    assert all(key.startswith(tuple(f"{path}." for path in short.optional_modules)) for key in cut)
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        expected, maps = whole(x), short(x)
    torch.testing.assert_close(maps, {key: expected[key] for key in maps}, rtol=0, atol=0)
    short.train()
    sum(out.square().mean() for out in short(torch.randn(2, 3, 64, 64)).values()).backward()
    assert [key for key, p in short.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("freeze_at", [2, 5])
def test_frozen_parts_stay_as_they_are_to_the_bit_and_all_others_train(name, freeze_at):
    backbone = build_backbone(_make_config(name, freeze_at)).train()
    sources = _parameters_behind(TimmBackbone(name=name, out_features=["s4", "s8", "s16"]))
    frozen = {2: sources["s4"], 5: set.union(*sources.values())}[freeze_at]
    before = copy.deepcopy(backbone.state_dict())
    loss = sum(out.square().mean() for out in backbone(torch.randn(2, 3, 64, 64)).values())
    if freeze_at < 5:
        loss.backward()
        torch.optim.SGD(backbone.parameters(), lr=0.1, weight_decay=0.1).step()
    for key, tensor in backbone.state_dict().items():
        if key in frozen or f"{key.rpartition('.')[0]}.weight" in frozen:
            torch.testing.assert_close(tensor, before[key], rtol=0, atol=0)
        else:
            assert tensor.count_nonzero() == 0 or not torch.equal(tensor, before[key]), key
    assert {key for key, p in backbone.named_parameters() if p.grad is not None}.isdisjoint(frozen)


def test_all_norms_can_be_frozen_while_convolutions_train():
    cfg = _make_config("mobilenetv4_conv_small")
    cfg.MODEL.TIMM.FREEZE_NORMS = True
    backbone = build_backbone(cfg).train()
    norms = {name for name, module in backbone.named_modules() if hasattr(module, "running_var")}
    bare = build_bare_backbone(cfg)
    assert all(parameter.requires_grad for parameter in bare.parameters())
    assert len([*bare.parameters()]) == len([*backbone.parameters()]) + 2 * len(norms)
    before = copy.deepcopy(backbone.state_dict())
    loss = sum(out.square().mean() for out in backbone(torch.randn(2, 3, 64, 64)).values())
    loss.backward()
    torch.optim.SGD(backbone.parameters(), lr=0.1).step()
    for key, tensor in backbone.state_dict().items():
        is_of_norm = key.rpartition(".")[0] in norms
        assert torch.equal(tensor, before[key]) == is_of_norm, key


@pytest.mark.parametrize("name", NAMES)
def test_frozen_norms_give_the_maps_of_norms_in_evaluation_in_their_dtype(name):
    plain = TimmBackbone(name=name, out_features=EVERY_STRIDE).eval()
    frozen = TimmBackbone(name=name, out_features=EVERY_STRIDE, freeze_at=5).train()
    for key, value in plain.state_dict().items():
        if key.endswith(("running_mean", "running_var")):
            value.uniform_(0.5, 1.5)
    plain.net.requires_grad_(False)
    assert frozen.load_state_dict(plain.state_dict(), strict=False).missing_keys == []
    x = torch.randn(2, 3, 64, 96)
    torch.testing.assert_close(frozen(x), plain(x))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert {out.dtype for out in frozen(x).values()} == {out.dtype for out in plain(x).values()}


def _parameters_behind(backbone):
    """The parameters that get a gradient from each output."""
    found = {}
    for key, out in backbone(torch.randn(2, 3, 64, 64)).items():
        backbone.zero_grad(set_to_none=True)
        out.square().mean().backward(retain_graph=True)
        found[key] = {name for name, p in backbone.named_parameters() if p.grad is not None}
    return found


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"name": "resnet81"}, "resnet81"),
        ({"name": "resnet18.a1_in1k"}, "WEIGHTS"),
        ({"name": "vit_tiny_patch16_224", "out_features": ["s16"]}, "vit_tiny_patch16_224"),
        ({"name": "inception_v3"}, "inception_v3"),
    ],
)
def test_what_cannot_be_a_backbone_is_refused(arguments, sentence):
    with pytest.raises(UserError, match=sentence):
        TimmBackbone(**{"out_features": ["s8", "s16"], **arguments})
