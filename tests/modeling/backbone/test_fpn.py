# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The pyramid on Mobile-Former as Detectron2's detectors see it."""

import pytest
import torch
from detectron2.modeling import build_backbone
from torch import nn
from torch.nn import functional as F

from qbheat_det.config import get_cfg
from qbheat_det.modeling.backbone.fpn import StridedLevels


@pytest.mark.parametrize(
    ("bottom_up", "in_features", "top_levels", "expected"),
    [
        ("MobileFormer", ["s8", "s16"], 3, {"p3": 8, "p4": 16, "p5": 32, "p6": 64, "p7": 128}),
        ("MobileFormer", ["s4", "s8", "s16"], 2, {"p2": 4, "p3": 8, "p4": 16, "p5": 32, "p6": 64}),
        ("MobileFormer", ["s8", "s16_expanded"], 1, {"p3": 8, "p4": 16, "p5": 32}),
        ("timm:resnet18", ["s8", "s16"], 3, {"p3": 8, "p4": 16, "p5": 32, "p6": 64, "p7": 128}),
        ("timm:resnet18", ["s8", "s16", "s32"], 1, {"p3": 8, "p4": 16, "p5": 32, "p6": 64}),
        ("build_resnet_backbone", ["res3", "res4"], 1, {"p3": 8, "p4": 16, "p5": 32}),
    ],
)
def test_levels_have_the_strides_of_their_names(
    bottom_up: str, in_features: list[str], top_levels: int, expected: dict[str, int]
) -> None:
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


def test_a_relu_stands_before_p7_alone() -> None:
    levels = StridedLevels(channels=4, in_feature="p5", num_levels=2)
    x = torch.randn(1, 4, 16, 16)
    p6, p7 = levels(x)
    first, second = (conv for conv in levels.convs if isinstance(conv, nn.Conv2d))
    torch.testing.assert_close(p6, first(x))
    torch.testing.assert_close(p7, second(F.relu(p6)))
