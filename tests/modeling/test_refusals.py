# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Arguments and config values out of range raise an error that names the key."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from detectron2.layers import ShapeSpec
from detectron2.modeling import build_model

from qbheat_det.core.errors import UserError
from qbheat_det.layers import SinePositionEncoding
from qbheat_det.modeling.backbone import (
    MOBILE_FORMER_ARCHS,
    MobileFormer,
    TimmBackbone,
    named_arch,
    shapes_of,
)
from qbheat_det.modeling.classification import BatchMixing, LinearDecoder, TransformerDecoder
from qbheat_det.modeling.detr import (
    DecoderWidths,
    FocalSettings,
    HungarianMatcher,
    MFDecoder,
    QueryGroups,
    build_classification,
)
from qbheat_det.modeling.pretrain import (
    DependencyLoss,
    FeatureQueue,
    HeatPredictor,
    LipschitzCritic,
    MaskToken,
    ProjectionHead,
    RandomMask,
    ReconstructionDecoder,
    ReconstructionLoss,
    find_map,
)
from qbheat_det.modeling.pretrain.base import check_equal_shares
from qbheat_det.modeling.pretrain.moco import MomentumCopy, check_batch
from tests.modeling.tiny_pretraining import make_inputs, make_tiny_config

ARCH = MOBILE_FORMER_ARCHS["285M"]
MAP = {"s16": ShapeSpec(channels=8, stride=16)}
DECODER = {"in_channels": 4, "grid_size": 4, "patch_size": 2, "dim": 8, "num_heads": 2}
LEVELS = [ShapeSpec(channels=8, stride=8), ShapeSpec(channels=8, stride=16)]


def build(keys: dict[str, Any], name: str = "QBHeat", count: int = 0) -> None:
    """Builds a model with other config values, and trains it on some images."""
    cfg = make_tiny_config(name)
    cfg.merge_from_list([word for pair in keys.items() for word in pair])
    model = build_model(cfg)
    if count:
        model(make_inputs(count))


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (partial(SinePositionEncoding, channels=6), "6"),
        (partial(MobileFormer, arch=ARCH, out_features=["res4"]), "res4"),
        (partial(MobileFormer, arch=ARCH, out_features=[]), "s16"),
        (partial(MobileFormer, arch=ARCH, out_features=["s8"], freeze_at=6), "FREEZE_AT"),
        (partial(MobileFormer, arch=ARCH, out_features=["s8"], drop_path=1.0), "DROP_PATH"),
        (partial(TimmBackbone, name="resnet18", out_features=["s8"], freeze_at=6), "FREEZE_AT"),
        (partial(TimmBackbone, name="resnet18", out_features=["res4"]), "res4"),
        (partial(named_arch, "86M"), "86M"),
        (partial(shapes_of, arch=ARCH, names=["p3"]), "p3"),
        (partial(BatchMixing, num_classes=0), "NUM_CLASSES"),
        (partial(BatchMixing, num_classes=3, label_smoothing=1.0), "LABEL_SMOOTHING"),
        (partial(BatchMixing, num_classes=3, mixup=-1.0), "MIXUP"),
        (partial(LinearDecoder, input_shape=MAP, num_classes=3), "IN_FEATURE"),
        (partial(TransformerDecoder, input_shape=MAP, num_classes=3, dim=100), "WIDTH"),
        (partial(TransformerDecoder, input_shape=MAP, num_classes=3, dim=64, depth=0), "DEPTH"),
        (partial(DecoderWidths, dim=10, num_heads=4), "HIDDEN_DIM"),
        (partial(FocalSettings, gamma=0.5), "GAMMA"),
        (partial(FocalSettings, alpha=2.0), "ALPHA"),
        (partial(FocalSettings, iou_target=-1.0), "IOU_TARGET"),
        (partial(FocalSettings, prior=0.0), "PRIOR"),
        (
            partial(build_classification, "hinge", no_object_weight=1.0, settings=FocalSettings()),
            "CLASSIFICATION",
        ),
        (partial(HungarianMatcher, class_weight=0, l1_weight=0, giou_weight=0), "zero"),
        (partial(MFDecoder, input_shape=LEVELS[:1], num_classes=3), "strides"),
        (partial(MFDecoder, input_shape=LEVELS, num_classes=3, num_blocks=(2, 0, 1)), "NUM_BLOCKS"),
        (partial(MFDecoder, input_shape=LEVELS, num_classes=3, num_queries=0), "NUM_OBJECT"),
        (partial(QueryGroups, num_queries=3, dim=8, num_groups=0), "COUNT"),
        (partial(QueryGroups, num_queries=3, dim=8, num_groups=1, weight=-1.0), "WEIGHT"),
        (partial(DependencyLoss, form="primal"), "FORM"),
        (partial(DependencyLoss, penalty_weight=0.0), "PENALTY_WEIGHT"),
        (partial(LipschitzCritic, dim=0), "DIM"),
        (partial(FeatureQueue, size=0, dim=2), "0"),
        (partial(MomentumCopy, torch.nn.Linear(1, 1), momentum=1.5), "MOMENTUM"),
        (partial(HeatPredictor, dim=0), "FEATURE_DIM"),
        (partial(HeatPredictor, dim=2, num_models=3), "NUM_MODELS"),
        (partial(HeatPredictor, dim=2, visible="edge"), "VISIBLE"),
        (partial(MaskToken, dim=0), "FEATURE_DIM"),
        (
            partial(ProjectionHead, input_shape=MAP, in_feature="s16", hidden_dim=0, dim=2),
            "HIDDEN_DIM",
        ),
        (partial(RandomMask, grid_size=8, mask_ratio=1.0), "MASK_RATIO"),
        (partial(ReconstructionDecoder, **{**DECODER, "dim": 10}), "DECODER_DIM"),
        (partial(ReconstructionDecoder, **DECODER, depth=0), "DECODER_DEPTH"),
        (partial(ReconstructionLoss, positions="visible"), "LOSS_ON"),
        (partial(find_map, MAP, "s8", 64), "IN_FEATURE"),
        (partial(find_map, MAP, "s16", 40, multiple=1), "SIZE"),
        (partial(build, {"MODEL.QB_HEAT.IN_FEATURE": "s4"}), "s4"),
        (partial(build, {"MODEL.WASSERSTEIN.RADIUS": 0.0}, "WassersteinDependency"), "RADIUS"),
        (partial(build, {"MODEL.MOCO.TEMPERATURE": 0.0}, "MoCo"), "TEMPERATURE"),
        (partial(build, {"MODEL.CLASSIFIER.DECODER": "mlp"}, "ImageClassifier"), "DECODER"),
    ],
)
def test_values_out_of_range_are_named(call: Callable[[], object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        call()


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (partial(check_equal_shares, 7, 2), "IMS_PER_BATCH"),
        (partial(check_batch, 10, 1, batch_size=4, processes=1, accumulate=1), "QUEUE_SIZE"),
        (partial(check_batch, 15, 4, batch_size=15, processes=1, accumulate=2), "NORM_GROUPS"),
        (partial(build, {}, "WassersteinDependency", 1), "IMS_PER_BATCH"),
        (partial(build, {}, "ImageClassifier", 2), "NUM_CLASSES"),
        (partial(build, {"MODEL.MOBILE_FORMER.VARIANT": "86M"}), "VARIANT"),
        (partial(build, {"MODEL.MOBILE_FORMER.BLOCKS": [["lite", 3, 8, 0]]}), "BLOCKS"),
        (
            partial(BatchMixing(num_classes=3, mixup=1.0), torch.zeros(3, 3, 2, 2), torch.zeros(3)),
            "IMS_PER_BATCH",
        ),
    ],
)
def test_what_a_user_can_mistake_is_named(call: Callable[[], object], named: str) -> None:
    with pytest.raises(UserError, match=named):
        call()
