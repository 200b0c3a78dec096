# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The backbone's contract with Detectron2, and the backbone whose features are cached."""

import copy

import pytest
import torch
from detectron2.modeling import build_backbone
from timm.layers import DropPath
from torch import nn
from torch.nn import functional as F

from qbheat_det.config import get_cfg
from qbheat_det.core.errors import UserError
from qbheat_det.feature_cache import CachedBackbone
from qbheat_det.modeling.backbone import MOBILE_FORMER_ARCHS, MobileFormer, MobileFormerArch
from qbheat_det.modeling.backbone.fpn import StridedLevels
from qbheat_det.modeling.cached_images import find_cached_images
from tests.modeling.tiny_pretraining import SMALL_ARCH

ALL_OUTPUTS = ("s2", "s4", "s8", "s16", "s16_expanded", "tokens")


@pytest.mark.parametrize("name", ["285M", "1.0G", "3.7G", "96M", "52M"])
@pytest.mark.parametrize("size", [(33, 47), (1, 1)])
def test_outputs_have_the_promised_shapes_at_any_image_size(name, size):
    arch = MOBILE_FORMER_ARCHS[name]
    names = list(arch.output_shapes())
    model = MobileFormer(arch=arch, out_features=names).eval()
    with torch.no_grad():
        outputs = model(torch.rand(2, 3, *size))
    shapes = model.output_shape()
    assert list(outputs) == list(shapes) == names
    for key in names[:-1]:
        stride = shapes[key].stride
        expected = (2, shapes[key].channels, -(-size[0] // stride), -(-size[1] // stride))
        assert outputs[key].shape == expected
    assert outputs["tokens"].shape == (2, arch.num_tokens, arch.token_dim)
    assert shapes["tokens"].stride is None
    assert model.size_divisibility == 0


def test_stochastic_depth_rises_evenly_from_zero_to_its_rate_in_the_last_block():
    model = MobileFormer(arch=SMALL_ARCH, out_features=ALL_OUTPUTS, drop_path=0.6)
    blocks = [block for stage in model.stages for block in stage]
    for number, block in enumerate(blocks):
        drops = [module.drop_prob for module in block.modules() if isinstance(module, DropPath)]
        assert drops == pytest.approx([0.1 * number] * len(drops))
    assert drops


@pytest.mark.parametrize("freeze_at", [0, 1, 3, 5, 9])
def test_frozen_tensors_are_bit_equal_after_training_and_the_others_move(freeze_at):
    model = MobileFormer(
        arch=SMALL_ARCH, out_features=ALL_OUTPUTS, freeze_at=freeze_at, drop_path=0.5
    ).train()
    parts = {
        1: ["stem.", "tokens"],
        2: ["stages.0."],
        3: ["stages.1."],
        4: ["stages.2."],
        5: ["stages.3.", "expand."],
    }
    frozen = tuple(name for level, names in parts.items() if level <= freeze_at for name in names)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    trainable = [p for p in model.parameters() if p.requires_grad]
    if trainable:
        optimizer = torch.optim.AdamW(trainable, lr=0.1, weight_decay=0.1)
    for _ in range(3):
        outputs = model(torch.rand(4, 3, 32, 32))
        loss = torch.stack([output.square().mean() for output in outputs.values()]).sum()
        if trainable:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    for key, value in model.state_dict().items():
        if key.startswith(frozen):
            assert torch.equal(value, before[key]), key
        else:
            assert not torch.equal(value, before[key]), key
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad != name.startswith(frozen), name


def test_only_what_the_outputs_need_is_built():
    model = MobileFormer(arch=SMALL_ARCH, out_features=["s4"])
    assert len(model.stages) == 2
    assert not hasattr(model, "expand")
    outputs = model(torch.rand(2, 3, 32, 32))
    outputs["s4"].sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize(
    "blocks",
    [
        [["lite", 20, 16, 0]],
        [["lite", 32, 20, 0]],
        [["down", 40, 28, 112]],
        [["down", 96, 28, 0]],
        [["down", 96, 28, 50]],
        [["plain", 96, 27, 0]],
        [["fancy", 96, 28, 0]],
        [],
        [["lite", 32]],
    ],
)
def test_a_table_that_is_no_network_is_refused(blocks):
    cfg = get_cfg()
    cfg.MODEL.BACKBONE.NAME = "MobileFormer"
    cfg.MODEL.MOBILE_FORMER.VARIANT = "custom"
    cfg.MODEL.MOBILE_FORMER.BLOCKS = blocks
    with pytest.raises(UserError, match="BLOCKS"):
        build_backbone(cfg)


@pytest.mark.parametrize(
    ("bottom_up", "in_features", "top_levels", "expected"),
    [
        ("MobileFormer", ["s8", "s16"], 3, {"p3": 8, "p4": 16, "p5": 32, "p6": 64, "p7": 128}),
        ("MobileFormer", ["s4", "s8", "s16"], 2, {"p2": 4, "p3": 8, "p4": 16, "p5": 32, "p6": 64}),
        ("timm:resnet18", ["s8", "s16"], 2, {"p3": 8, "p4": 16, "p5": 32, "p6": 64}),
        ("build_resnet_backbone", ["res3", "res4"], 1, {"p3": 8, "p4": 16, "p5": 32}),
    ],
)
def test_levels_have_the_strides_of_their_names(bottom_up, in_features, top_levels, expected):
    cfg = get_cfg()
    cfg.MODEL.BACKBONE.NAME = "build_fpn_backbone"
    cfg.MODEL.FPN.BOTTOM_UP = bottom_up
    cfg.MODEL.FPN.IN_FEATURES = in_features
    cfg.MODEL.FPN.TOP_LEVELS = top_levels
    cfg.MODEL.FPN.OUT_CHANNELS = 32
    backbone = build_backbone(cfg)
    assert {name: shape.stride for name, shape in backbone.output_shape().items()} == expected
    coarsest = len(expected) - top_levels - 1
    assert backbone.size_divisibility == list(expected.values())[coarsest]
    assert list(backbone.bottom_up.output_shape()) == in_features
    maps = backbone(torch.rand(1, 3, 128, 192))
    for name, stride in expected.items():
        assert maps[name].shape == (1, 32, -(-128 // stride), -(-192 // stride))


def test_a_relu_stands_before_p7_alone():
    levels = StridedLevels(channels=4, in_feature="p5", num_levels=2)
    x = torch.randn(1, 4, 16, 16)
    p6, p7 = levels(x)
    first, second = (conv for conv in levels.convs if isinstance(conv, nn.Conv2d))
    torch.testing.assert_close(p6, first(x))
    torch.testing.assert_close(p7, second(F.relu(p6)))


ARCH = MobileFormerArch(
    num_tokens=2, token_dim=32, stem=8, rows=[("lite", 8, 8), ("down", 16, 8, 16)], expanded=12
)
OUTPUTS = ["s4", "tokens"]


class Model(nn.Module):
    """Returns what its backbone gives for cached features."""

    def __init__(self, backbone):
        super().__init__()
        self.backbone = backbone

    def forward(self, batched_inputs):
        cached = find_cached_images(batched_inputs, 0, torch.device("cpu"))
        images = torch.zeros(1, 3, 8, 8) if cached is None else cached.tensor
        return self.backbone(images)


def make_encoder(seed=0):
    torch.manual_seed(seed)
    return MobileFormer(arch=ARCH, out_features=OUTPUTS, freeze_at=3)


def make_cached():
    cached = CachedBackbone(encoder=make_encoder(), outputs=OUTPUTS)
    return Model(cached), cached


def make_entries(rows=2):
    features = {"s4": torch.rand(8, rows, 2), "tokens": torch.rand(2, 32)}
    return [{"image_size": (8, 8), "features": features}]


def test_loading_fills_the_encoder_refuses_a_part_and_says_what_is_not_known():
    model, cached = make_cached()
    wanted = Model(make_encoder(1)).state_dict()
    part = {name: value for name, value in wanted.items() if name != "backbone.tokens"}
    with pytest.raises(UserError, match="tokens"):
        model.load_state_dict(part, strict=False)
    found = model.load_state_dict({**wanted, "backbone.other": torch.zeros(1)}, strict=False)
    assert found.unexpected_keys == ["backbone.other"]
    model.load_state_dict(wanted)
    torch.testing.assert_close(
        dict(cached.encoder.state_dict()), dict(make_encoder(1).state_dict()), rtol=0, atol=0
    )
    with pytest.raises(RuntimeError):
        model.load_state_dict({**wanted, "backbone.tokens": torch.zeros(1, 1)})


def test_features_are_refused_unless_they_are_of_these_weights_and_images():
    model, cached = make_cached()
    entries = make_entries()
    with pytest.raises(UserError):
        model(entries)
    cached.trust()
    model.load_state_dict(copy.deepcopy(model.state_dict()))  # the same
    model(entries)
    model.load_state_dict({**model.state_dict(), "backbone.tokens": torch.ones(2, 32)})
    with pytest.raises(UserError):
        model(entries)

    model, cached = make_cached()
    cached.trust()
    with pytest.raises(UserError):
        model([{"image": torch.zeros(3, 8, 8)}])
    with pytest.raises(UserError):
        model(make_entries(rows=9))
