# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What models offer by ``contracts``, and config values out of range, which name the key."""

from functools import partial

import pytest
import torch
from detectron2.layers import ShapeSpec
from detectron2.modeling import META_ARCH_REGISTRY, Backbone, build_model
from detectron2.modeling.backbone import FPN

from qbheat_det import get_cfg
from qbheat_det.core.errors import UserError
from qbheat_det.engine import Trainer
from qbheat_det.layers import SinePositionEncoding
from qbheat_det.modeling import contracts
from qbheat_det.modeling.backbone import MOBILE_FORMER_ARCHS, MobileFormer, TimmBackbone
from qbheat_det.modeling.classification import BatchMixing
from qbheat_det.modeling.detr import SetCriterion
from qbheat_det.modeling.pretrain import HeatPredictor, QBHeat
from qbheat_det.modeling.pretrain.all_processes import check_equal_shares
from qbheat_det.modeling.pretrain.base import find_feature_map
from qbheat_det.modeling.pretrain.moco import FeatureQueue, check_batch
from tests.modeling.tiny_pretraining import make_copying_model, make_inputs, make_tiny_config

ARCH = MOBILE_FORMER_ARCHS["285M"]
MAP = {"s16": ShapeSpec(channels=8, stride=16)}
# By model, keys below MODEL with a value; the error names the last key.
VALUES = {
    "QBHeat": [
        "BACKBONE.FREEZE_AT -1",
        "MOBILE_FORMER.DROP_PATH 1.0",
        "QB_HEAT.FEATURE_DIM 0",
        "QB_HEAT.NUM_MODELS 3",
        "QB_HEAT.VISIBLE edge",
        "QB_HEAT.DECODER_DIM 10",
        "QB_HEAT.DECODER_DEPTH 0",
        "QB_HEAT.IN_FEATURE s4",
    ],
    "MaskTokenMasking": ["RANDOM_MASKING.MASK_RATIO 1.0"],
    "MoCo": ["MOCO.TEMPERATURE 0.0", "MOCO.MOMENTUM 1.5", "MOCO.HIDDEN_DIM 0"],
    "WassersteinDependency": [
        "WASSERSTEIN.FORM primal",
        "WASSERSTEIN.PENALTY_WEIGHT 0.0",
        "WASSERSTEIN.RADIUS 0.0",
        "WASSERSTEIN.CRITIC_DIM 0",
    ],
    "ImageClassifier": [
        "CLASSIFIER.DECODER mlp",
        "CLASSIFIER.NUM_CLASSES 0",
        "CLASSIFIER.LABEL_SMOOTHING 1.0",
        "CLASSIFIER.MIXUP -1.0",
        "CLASSIFIER.IN_FEATURE s8",
        "CLASSIFIER.DECODER transformer CLASSIFIER.WIDTH 100",
        "CLASSIFIER.DECODER transformer CLASSIFIER.DEPTH 0",
    ],
    "MFDETR": [
        "MF_DETR.IN_FEATURES ['s4','s8']",
        "MF_DETR.HIDDEN_DIM 10",
        "MF_DETR.NUM_BLOCKS [2,0,1]",
        "MF_DETR.NUM_OBJECT_QUERIES 0",
        "MF_DETR.CLASSIFICATION hinge",
        "MF_DETR.FOCAL.GAMMA 0.5",
        "MF_DETR.FOCAL.ALPHA 2.0",
        "MF_DETR.FOCAL.IOU_TARGET -1.0",
        "MF_DETR.FOCAL.PRIOR 0.0",
    ],
}


def build(name, words, count=0):
    """Builds a model with other config values, and trains it on some images."""
    cfg = make_tiny_config(name)
    if name == "MFDETR":
        cfg.MODEL.MOBILE_FORMER.OUT_FEATURES = ["s8", "s16_expanded"]
    keys, values = words.split()[::2], words.split()[1::2]
    for key, value in zip(keys, values, strict=True):
        cfg.merge_from_list([f"MODEL.{key}", value])
    model = build_model(cfg)
    if count:
        model(make_inputs(count))


@pytest.mark.parametrize(
    ("name", "words"), [(name, words) for name, each in VALUES.items() for words in each]
)
def test_config_values_out_of_range_are_named(name, words):
    key = words.split()[-2].rpartition(".")[2]
    with pytest.raises(ValueError, match=key):
        build(name, words)


def test_bad_values_become_a_sentence_but_errors_of_users_models_do_not(monkeypatch):
    def own_model(cfg):
        return torch.nn.Linear(3, -1)

    monkeypatch.setitem(META_ARCH_REGISTRY._obj_map, "OwnModel", own_model)
    cfg = make_tiny_config("QBHeat")
    cfg.MODEL.QB_HEAT.FEATURE_DIM = 0
    with pytest.raises(UserError, match=r"from this config.*FEATURE_DIM"):
        Trainer.build_model(cfg)
    cfg.MODEL.META_ARCHITECTURE = "OwnModel"
    with pytest.raises(RuntimeError, match="negative"):
        Trainer.build_model(cfg)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("MoCo", "MODEL.MOCO.IN_FEATURE"),
        ("WassersteinDependency", "MODEL.WASSERSTEIN.IN_FEATURE"),
        ("QBHeat", "MODEL.QB_HEAT.IN_FEATURE"),
        ("FeatureDistillation", "MODEL.QB_HEAT.IN_FEATURE"),
    ],
)
def test_a_feature_map_that_a_network_lacks_is_named_with_one_that_it_has(name, key):
    words = f"BACKBONE.NAME timm:resnet18 {key.removeprefix('MODEL.')} s16_expanded"
    with pytest.raises(ValueError, match=f"{key} 's16_expanded'.* such as {key} s16,"):
        build(name, words)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (partial(SinePositionEncoding, channels=6), "6"),
        (partial(MobileFormer, arch=ARCH, out_features=["res4"]), "res4"),
        (partial(TimmBackbone, name="resnet18", out_features=["s8"], freeze_at=-1), "FREEZE_AT"),
        (partial(TimmBackbone, name="resnet18", out_features=["res4"]), "res4"),
        (partial(SetCriterion, num_classes=1, class_weight=0, l1_weight=0, giou_weight=0), "zero"),
        (partial(FeatureQueue, size=0, dim=2), "0"),
        (partial(build, "MFDETR", "MF_DETR.IN_FEATURES ['s16_expanded','s8']"), "strides"),
        (partial(make_copying_model, QBHeat, HeatPredictor(dim=2), 8, stride=8), "stride 8"),
        (
            partial(make_copying_model(QBHeat, HeatPredictor(dim=2), 4), make_inputs(1), ["edge"]),
            "edge",
        ),
        (partial(find_feature_map, MAP, "s8", 64), "IN_FEATURE"),
        (partial(find_feature_map, MAP, "s16", 40, multiple=1), "SIZE"),
    ],
)
def test_arguments_out_of_range_are_named(call, named):
    with pytest.raises(ValueError, match=named):
        call()


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (partial(check_equal_shares, 7, 2), "IMS_PER_BATCH"),
        (partial(check_batch, 10, 1, batch_size=4, processes=1, accumulate=1), "QUEUE_SIZE"),
        (partial(check_batch, 15, 4, batch_size=15, processes=1, accumulate=2), "NORM_GROUPS"),
        (partial(build, "WassersteinDependency", "", 1), "IMS_PER_BATCH"),
        (partial(build, "ImageClassifier", "", 2), "NUM_CLASSES"),
        (partial(build, "QBHeat", "MOBILE_FORMER.VARIANT 86M"), "VARIANT"),
        (partial(build, "QBHeat", "MOBILE_FORMER.BLOCKS [['lite',3,8,0]]"), "BLOCKS"),
        (
            partial(BatchMixing(num_classes=3, mixup=1.0), torch.zeros(3, 3, 2, 2), torch.zeros(3)),
            "IMS_PER_BATCH",
        ),
    ],
)
def test_what_a_user_can_mend_is_named(call, named):
    with pytest.raises(UserError, match=named):
        call()


def test_more_keys_than_a_queue_holds_are_refused():
    with pytest.raises(RuntimeError, match="QUEUE_SIZE"):
        FeatureQueue(size=4, dim=2).hold(torch.zeros(5, 2))


# By meta-architecture: the Protocols that it fits, of those that are checked.
EXPECTED = {
    "MFDETR": {"SupportsLossNormalizers"},
    "SyncRetinaNet": {"SupportsLossNormalizers"},
    "SyncFCOS": {"SupportsLossNormalizers"},
    "ImageClassifier": {"FixedSizeModel"},
    "MoCo": {"FixedSizeModel", "PretrainingObjective", "SupportsAfterStep"},
    "WassersteinDependency": {"FixedSizeModel", "PretrainingObjective"},
    "QBHeat": {"FixedSizeModel", "PretrainingObjective"},
    "InterpolatedMasking": {"FixedSizeModel", "PretrainingObjective"},
}
CHECKED = {name for names in EXPECTED.values() for name in names}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_model_fits_its_protocols(name):
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
    assert contracts.get_pixel_format(model) == cfg.INPUT.FORMAT
    views = contracts.get_views(cfg)
    assert set(views) == ({"corner", "centre"} if name == "QBHeat" else {"image"})


class Below(Backbone):
    """A backbone that is never run."""

    def forward(self):
        raise NotImplementedError


def test_the_encoder_stands_below_a_pyramid():
    encoder = MobileFormer(arch=MOBILE_FORMER_ARCHS["285M"], out_features=["s8", "s16"])
    pyramid = FPN(encoder, ["s8", "s16"], 8)
    vit, simple = Below(), Below()
    simple.net = vit  # as ViTDet's pyramid
    found = [contracts.get_encoder(backbone) for backbone in (encoder, pyramid, simple)]
    assert found == [encoder, encoder, vit]
    expected = ["bottom_up.expand", "bottom_up.last_bridge"]
    assert contracts.optional_modules(pyramid) == expected
    assert [contracts.get_freeze_all(each) for each in (encoder, vit)] == [encoder.freeze_all, 5]
