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
    ("in_features", "top_levels", "expected"),
    [
        (["s8", "s16"], 3, {"p3": 8, "p4": 16, "p5": 32, "p6": 64, "p7": 128}),
        (["s4", "s8", "s16"], 2, {"p2": 4, "p3": 8, "p4": 16, "p5": 32, "p6": 64}),
        (["s8", "s16_expanded"], 1, {"p3": 8, "p4": 16, "p5": 32}),
    ],
)
def test_levels_have_the_strides_of_their_names(
    in_features: list[str], top_levels: int, expected: dict[str, int]
) -> None:
    cfg = get_cfg()
    cfg.MODEL.BACKBONE.NAME = "build_mobile_former_fpn_backbone"
    cfg.MODEL.FPN.IN_FEATURES = in_features
    cfg.MODEL.FPN.TOP_LEVELS = top_levels
    cfg.MODEL.FPN.OUT_CHANNELS = 32
    backbone = build_backbone(cfg)
    assert {name: shape.stride for name, shape in backbone.output_shape().items()} == expected
    assert backbone.size_divisibility == 16
    maps = backbone(torch.rand(1, 3, 128, 192))
    for name, stride in expected.items():
        assert maps[name].shape == (1, 32, -(-128 // stride), -(-192 // stride))


def test_a_relu_stands_before_the_third_new_level_and_no_other() -> None:
    levels = StridedLevels(channels=4, in_feature="p4", num_levels=3)
    x = torch.randn(1, 4, 16, 16)
    p5, p6, p7 = levels(x)
    convs = [conv for conv in levels.convs if isinstance(conv, nn.Conv2d)]
    torch.testing.assert_close(p5, convs[0](x))
    torch.testing.assert_close(p6, convs[1](p5))
    torch.testing.assert_close(p7, convs[2](F.relu(p6)))
