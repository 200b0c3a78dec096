# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Layers of backbones, against names taken apart by hand."""

import importlib

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


def test_detectron2s_resnet_counts_its_stem_then_its_blocks() -> None:
    cfg = get_cfg()
    cfg.MODEL.BACKBONE.NAME = "build_resnet_fpn_backbone"
    cfg.MODEL.RESNETS.OUT_FEATURES = cfg.MODEL.FPN.IN_FEATURES = ["res2", "res3", "res4", "res5"]
    cfg.MODEL.RESNETS.NORM = cfg.MODEL.FPN.NORM = "BN"
    before = {"res2": 0, "res3": 3, "res4": 7, "res5": 13}  # ResNet-50 has 3, 4, 6, 3 blocks
    above = layers_above(build_backbone(cfg))
    for name, number in above.items():
        parts = name.split(".")
        if parts[0] != "bottom_up":
            assert number == 0, name
        elif parts[1] == "stem":
            assert number == 17, name
        else:
            assert number == 16 - before[parts[1]] - int(parts[2]), name
    assert set(above.values()) == set(range(18))


def test_rates_are_those_of_timms_layer_decay_and_of_its_classifier_one() -> None:
    model = timm.create_model("vit_tiny_patch16_224", num_classes=7)
    groups = param_groups_layer_decay(model, layer_decay=0.8)
    scales = {p: group["lr_scale"] for group in groups for p in group["params"]}
    backbone = timm.create_model("vit_tiny_patch16_224", num_classes=0)
    for name, number in layers_above(backbone).items():
        assert 0.8**number == pytest.approx(scales[model.get_parameter(name)]), name
    assert {scales[p] for p in model.head.parameters()} == {1.0}


def test_detectron2s_vision_transformers_count_patches_then_blocks() -> None:
    try:
        vit = importlib.import_module("detectron2.modeling.backbone.vit")
        swin = importlib.import_module("detectron2.modeling.backbone.swin")
    except ImportError:
        pytest.skip("v0.6 of Detectron2 has none")
    net = vit.ViT(img_size=32, embed_dim=16, depth=3, num_heads=2, residual_block_indexes=(1,))
    pyramid = vit.SimpleFeaturePyramid(net, "last_feat", 8, scale_factors=(1.0,))
    above = layers_above(pyramid)
    assert {above["net.pos_embed"], above["net.patch_embed.proj.weight"]} == {4}
    for block in range(3):
        assert above[f"net.blocks.{block}.mlp.fc1.weight"] == 3 - block
    assert above["net.blocks.1.residual.conv1.weight"] == 0
    assert all(number == 0 for name, number in above.items() if name.startswith("simfp"))

    above = layers_above(
        swin.SwinTransformer(embed_dim=8, depths=[2, 2], num_heads=[1, 1], out_indices=(0, 1))
    )
    assert above["patch_embed.proj.weight"] == 5
    assert above["layers.0.blocks.0.mlp.fc1.weight"] == 4
    assert above["layers.0.downsample.reduction.weight"] == 3
    assert above["layers.0.blocks.1.mlp.fc1.weight"] == 3
    assert above["layers.1.blocks.1.mlp.fc1.weight"] == 1
    assert above["norm0.weight"] == 0


def test_a_backbone_without_known_layers_is_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"LAYER_DECAY.*Sequential"):
        layers_above(nn.Sequential(nn.Conv2d(3, 4, 1)))
