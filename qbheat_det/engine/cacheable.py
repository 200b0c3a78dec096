# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Which models and recipes can train from cached features, and the replacement of the encoder."""

import torch
from detectron2.config import CfgNode
from detectron2.modeling import Backbone, GeneralizedRCNN
from detectron2.modeling.backbone import FPN
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torchvision.ops import StochasticDepth

from qbheat_det.config import find_memory_format
from qbheat_det.core.errors import UserError
from qbheat_det.modeling.backbone import CachedBackbone
from qbheat_det.modeling.contracts import (
    PretrainingObjective,
    get_backbone,
    get_freeze_all,
    get_in_features,
    keeps_backbone_in_eval,
)

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
_MAX_VIEWS = 1000
_OFF = "set MODEL.CACHE_FEATURES.ENABLED False"


def check_cacheable(cfg: CfgNode) -> None:
    """Checks the keys of a config that has the cache on.

    Raises:
        UserError: there is no fixed number of views, or the recipe needs what a cache cannot give.
    """
    if not 1 <= cfg.INPUT.FIXED_VIEWS.COUNT <= _MAX_VIEWS:
        raise UserError(
            "MODEL.CACHE_FEATURES needs a number of views of each image: set "
            f"INPUT.FIXED_VIEWS.COUNT, to {_MAX_VIEWS} at most"
        )
    dtype = cfg.MODEL.CACHE_FEATURES.DTYPE
    if dtype not in DTYPES:
        raise UserError(f"MODEL.CACHE_FEATURES.DTYPE is '{dtype}', not one of {', '.join(DTYPES)}")
    classifies = cfg.MODEL.META_ARCHITECTURE == "ImageClassifier"
    mixes = "mixes images before the encoder, anew in every step"
    for key, is_on, reason in (
        ("MODEL.CLASSIFIER.MIXUP", classifies and cfg.MODEL.CLASSIFIER.MIXUP > 0, mixes),
        ("MODEL.CLASSIFIER.CUTMIX", classifies and cfg.MODEL.CLASSIFIER.CUTMIX > 0, mixes),
        ("MODEL.MASK_ON", cfg.MODEL.MASK_ON, "needs masks, which are not cached"),
        ("MODEL.KEYPOINT_ON", cfg.MODEL.KEYPOINT_ON, "needs keypoints, which are not cached"),
        ("MODEL.LOAD_PROPOSALS", cfg.MODEL.LOAD_PROPOSALS, "needs proposals, which are not cached"),
        ("TEST.KNN", cfg.TEST.KNN.TRAIN or cfg.TEST.KNN.VAL, "scores an encoder that stays frozen"),
        ("VIS_PERIOD", cfg.VIS_PERIOD > 0, "draws training images, which are not loaded"),
    ):
        if is_on:
            raise UserError(f"{key} {reason}: switch it off, or {_OFF}")


def replace_encoder(cfg: CfgNode, model: nn.Module) -> CachedBackbone:
    """Puts a ``CachedBackbone`` in the place of a model's frozen encoder, and returns it.

    Raises:
        UserError: the model has no frozen encoder.
    """
    backbone = get_backbone(model)
    if backbone is None:
        raise UserError(f"{type(model).__name__} has no backbone to cache: {_OFF}")
    has_pyramid = isinstance(backbone, FPN)
    encoder = backbone.bottom_up if has_pyramid else backbone
    check_frozen(model, encoder, cfg.MODEL.BACKBONE.FREEZE_AT)
    cached = CachedBackbone(
        encoder=encoder.to("cpu"),
        outputs=get_in_features(backbone if has_pyramid else model) or list(encoder.output_shape()),
        channels_last=find_memory_format(cfg) == torch.channels_last,
    )
    if has_pyramid:
        backbone.bottom_up = cached
    else:
        model.backbone = cached
    return cached


def check_frozen(model: nn.Module, encoder: Backbone, freeze_at: int) -> None:
    """Checks that the encoder of a model gives the same features in every step.

    Raises:
        UserError: the model pre-trains its encoder or reads pixels alone, or part of the encoder
            changes in training, or draws random numbers.
    """
    kind, name = type(model).__name__, type(encoder).__name__
    if isinstance(model, PretrainingObjective):
        raise UserError(f"{kind} pre-trains its encoder, which cannot be cached: {_OFF}")
    if isinstance(model, GeneralizedRCNN):
        raise UserError(f"Detectron2's {kind} reads pixels alone, not cached features: {_OFF}")
    learning = [path for path, p in encoder.named_parameters() if p.requires_grad]
    stays_in_eval = keeps_backbone_in_eval(model) and not learning
    modules = [] if stays_in_eval else list(encoder.named_modules())
    moving = learning or [path for path, module in modules if isinstance(module, _BatchNorm)]
    if moving:
        raise UserError(
            f"'{moving[0]}' and {len(moving) - 1} more of {name} change in training: set "
            f"MODEL.BACKBONE.FREEZE_AT to {get_freeze_all(encoder)} instead of {freeze_at}, or "
            f"{_OFF}"
        )
    for path, module in modules:
        if _get_drop_rate(module):
            raise UserError(f"'{path}' of {name} drops values in training: {_OFF}")


def _get_drop_rate(module: nn.Module) -> float:
    if isinstance(module, _DropoutNd | StochasticDepth):
        return float(module.p)
    if isinstance(module, nn.MultiheadAttention):
        return float(module.dropout)
    return float(getattr(module, "drop_prob", 0.0) or 0.0)  # timm's name, and others'
