# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Every model of the package offers what ``contracts`` says of it, and others get defaults."""

from pathlib import Path

import pytest
import torch
from detectron2.modeling import Backbone, build_model
from detectron2.modeling.backbone import FPN
from torch import nn

from qbheat_det import get_cfg
from qbheat_det.modeling import contracts
from qbheat_det.modeling.backbone import MOBILE_FORMER_ARCHS, MobileFormer

# By meta-architecture: the Protocols that it fits, of those that are checked.
EXPECTED = {
    "MFDETR": {"SupportsLossNormalizers"},
    "SyncRetinaNet": {"SupportsLossNormalizers"},
    "SyncFCOS": {"SupportsLossNormalizers"},
    "ImageClassifier": {"FixedSizeModel"},
    "MoCo": {"FixedSizeModel", "PretrainingObjective", "SupportsAfterStep"},
    "WassersteinDependency": {"FixedSizeModel", "PretrainingObjective"},
    "QBHeat": {"FixedSizeModel", "PretrainingObjective", "ReconstructionObjective"},
    "InterpolatedMasking": {"FixedSizeModel", "PretrainingObjective", "ReconstructionObjective"},
}
CHECKED = {name for names in EXPECTED.values() for name in names}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_model_fits_its_protocols(name: str) -> None:
    cfg = get_cfg()
    cfg.MODEL.DEVICE = "meta"
    cfg.MODEL.META_ARCHITECTURE = name
    is_pyramid = name in ("SyncRetinaNet", "SyncFCOS")
    cfg.MODEL.BACKBONE.NAME = "build_mobile_former_fpn_backbone" if is_pyramid else "MobileFormer"
    if is_pyramid:
        cfg.MODEL.FPN.IN_FEATURES = ["s8", "s16"]
        cfg.MODEL.RETINANET.IN_FEATURES = cfg.MODEL.FCOS.IN_FEATURES = ["p3", "p4"]
    elif name != "MFDETR":
        cfg.MODEL.MOBILE_FORMER.OUT_FEATURES = ["s16_expanded", "tokens"]
    with torch.device("meta"):
        model = build_model(cfg)
    fits = {protocol for protocol in CHECKED if isinstance(model, getattr(contracts, protocol))}
    assert fits == EXPECTED[name]
    assert contracts.get_backbone(model) is model.backbone
    assert set(contracts.get_in_features(model) or ()) <= set(model.backbone.output_shape())
    assert set(contracts.pretrain_only_modules(model)) <= dict(model.named_children()).keys()
    assert contracts.has_held_out_loss(model) == (name not in ("MoCo", "WassersteinDependency"))
    assert contracts.masks_padding(model) == (name == "MFDETR")
    assert set(contracts.get_pixel_statistics(model)) == {"pixel_mean", "pixel_std"}
    views = contracts.get_views(cfg)
    assert set(views) == ({"corner", "centre"} if name == "QBHeat" else {"image"})


def test_any_other_module_gets_the_defaults() -> None:
    model = nn.Conv2d(1, 1, 1)
    assert contracts.get_backbone(model) is contracts.get_in_features(model) is None
    assert contracts.has_held_out_loss(model)
    assert not contracts.keeps_backbone_in_eval(model)
    assert not any(
        found(model)
        for found in (
            contracts.get_metrics,
            contracts.train_only_modules,
            contracts.pretrain_only_modules,
            contracts.optional_modules,
            contracts.equivalent_configs,
            contracts.get_pixel_statistics,
        )
    )


class Below(Backbone):
    """A backbone that is never run."""

    def forward(self) -> None:
        raise NotImplementedError


def test_the_encoder_stands_below_a_pyramid() -> None:
    encoder = MobileFormer(arch=MOBILE_FORMER_ARCHS["285M"], out_features=["s8", "s16"])
    pyramid = FPN(encoder, ["s8", "s16"], 8)
    vit, simple = Below(), Below()
    simple.net = vit  # as ViTDet's pyramid
    found = [contracts.get_encoder(backbone) for backbone in (encoder, pyramid, simple)]
    assert found == [encoder, encoder, vit]
    expected = ["bottom_up.expand", "bottom_up.last_bridge"]
    assert contracts.optional_modules(pyramid) == expected
    assert [contracts.get_freeze_all(each) for each in (encoder, vit)] == [encoder.freeze_all, 5]


def test_the_contracts_import_nothing_of_the_package() -> None:
    assert "from qbheat_det" not in Path(contracts.__file__).read_text(encoding="utf-8")
