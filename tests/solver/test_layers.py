# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Layers of backbones, against names taken apart by hand."""

import pytest
import timm
from detectron2.modeling import build_backbone
from timm.optim import param_groups_layer_decay
from torch import nn

from qbheat_det.config import get_cfg
from qbheat_det.core.errors import UserError
from qbheat_det.modeling.backbone import MOBILE_FORMER_ARCHS, MobileFormer
from qbheat_det.solver import layers_above


def mobile_former_layer(name: str) -> int:
    """The layer of a parameter of MF-285M, counted from the image: 1, 2, 3 and 6 blocks a stage."""
    parts = name.split(".")
    if parts[0] in ("stem", "tokens"):
        return 0
    if parts[0] == "expand":
        return 13
    return 1 + [0, 1, 3, 6][int(parts[1])] + int(parts[2])


def test_mobile_former_counts_its_blocks_and_a_pyramid_stands_level_with_the_head() -> None:
    arch = MOBILE_FORMER_ARCHS["285M"]
    backbone = MobileFormer(arch=arch, out_features=["s8", "s16_expanded"], freeze_at=2)
    expected = {name: 14 - mobile_former_layer(name) for name, _ in backbone.named_parameters()}
    assert layers_above(backbone) == expected
    assert set(expected.values()) == set(range(1, 15))
    cfg = get_cfg()
    cfg.MODEL.BACKBONE.NAME = "build_mobile_former_fpn_backbone"
    cfg.MODEL.FPN.IN_FEATURES, cfg.MODEL.FPN.OUT_CHANNELS = ["s8", "s16"], 8
    for name, number in layers_above(build_backbone(cfg)).items():
        inside = name.removeprefix("bottom_up.")
        assert number == (0 if name == inside else 13 - mobile_former_layer(inside)), name


def test_rates_are_those_of_timms_layer_decay_and_of_its_classifier_one() -> None:
    model = timm.create_model("vit_tiny_patch16_224", num_classes=7)
    groups = param_groups_layer_decay(model, layer_decay=0.8)
    scales = {p: group["lr_scale"] for group in groups for p in group["params"]}
    backbone = timm.create_model("vit_tiny_patch16_224", num_classes=0)
    for name, number in layers_above(backbone).items():
        assert 0.8**number == pytest.approx(scales[model.get_parameter(name)]), name
    assert {scales[p] for p in model.head.parameters()} == {1.0}


def test_a_backbone_without_known_layers_is_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"LAYER_DECAY.*Sequential"):
        layers_above(nn.Sequential(nn.Conv2d(3, 4, 1)))
