# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What cannot be trained from cached features: each a sentence that says why, and what to do."""

from detectron2.config import CfgNode
from detectron2.modeling import Backbone, GeneralizedRCNN
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torchvision.ops import StochasticDepth

from qbheat_det.core.errors import UserError
from qbheat_det.modeling.pretrain import PretrainingModel

from .knn_look import names_neighbours

_WAY_OUT = "set MODEL.CACHE_FEATURES.ENABLED False"


def check_cacheable(cfg: CfgNode) -> None:
    """Checks the keys of a config that has the cache on.

    Raises:
        UserError: there is no fixed number of views, or the recipe needs what a cache cannot give.
    """
    if cfg.INPUT.FIXED_VIEWS.COUNT < 1:
        raise UserError(
            "MODEL.CACHE_FEATURES encodes a fixed number of views of each image: set "
            "INPUT.FIXED_VIEWS.COUNT, to 4 for example; more views augment better and take as much "
            "more time and disk once"
        )
    mixing = {
        f"MODEL.CLASSIFIER.{key}": cfg.MODEL.CLASSIFIER[key]
        for key in ("MIXUP", "CUTMIX")
        if cfg.MODEL.META_ARCHITECTURE == "ImageClassifier" and cfg.MODEL.CLASSIFIER[key] > 0
    }
    if mixing:
        key, value = next(iter(mixing.items()))
        raise UserError(
            f"{key} {value} mixes images before the encoder, anew in every step, so that their "
            f"features cannot be cached: set it to 0, or {_WAY_OUT}"
        )
    for key, is_on, what in (
        ("MODEL.MASK_ON", cfg.MODEL.MASK_ON, "masks"),
        ("MODEL.KEYPOINT_ON", cfg.MODEL.KEYPOINT_ON, "keypoints"),
        ("MODEL.LOAD_PROPOSALS", cfg.MODEL.LOAD_PROPOSALS, "proposals"),
    ):
        if is_on:
            raise UserError(
                f"MODEL.CACHE_FEATURES keeps boxes and classes, but {key} needs {what}: switch it "
                f"off, or {_WAY_OUT}"
            )
    if names_neighbours(cfg):
        raise UserError(
            "TEST.KNN scores the encoder, which is not run where its features are cached, and "
            "which does not change while it is frozen: leave TEST.KNN empty and score it once with "
            "tools/probe_backbone.py"
        )
    if cfg.VIS_PERIOD > 0:
        raise UserError(
            f"VIS_PERIOD {cfg.VIS_PERIOD} draws training images, which are not loaded where "
            f"features are cached: set it to 0, or {_WAY_OUT}"
        )


def check_frozen(model: nn.Module, encoder: Backbone, freeze_at: int) -> None:
    """Checks that a model's encoder gives the same features in every step.

    Args:
        model: that it is a part of.
        encoder: the network below the head.
        freeze_at: ``MODEL.BACKBONE.FREEZE_AT``, for the sentence.

    Raises:
        UserError: the model pre-trains its encoder, or part of the encoder changes in training, or
            draws random numbers.
    """
    if isinstance(model, PretrainingModel):
        raise UserError(
            f"MODEL.CACHE_FEATURES is for heads on a frozen encoder, but {type(model).__name__} "
            f"pre-trains its encoder: {_WAY_OUT}"
        )
    if isinstance(model, GeneralizedRCNN):
        raise UserError(
            f"MODEL.CACHE_FEATURES is for MF-DETR, RetinaNet, FCOS and classifiers: Detectron2's "
            f"{type(model).__name__} reads pixels alone, so {_WAY_OUT}"
        )
    learning = [name for name, p in encoder.named_parameters() if p.requires_grad]
    stays_in_evaluation = getattr(model, "is_frozen", False) and not learning
    modules = [] if stays_in_evaluation else list(encoder.named_modules())
    moving = [name for name, module in modules if isinstance(module, _BatchNorm)]
    if not learning and not moving:
        _check_not_random(encoder, modules)
        return
    changing = f"'{(learning or moving)[0]}' and {len(learning or moving) - 1} more"
    last = getattr(encoder, "freezes_all", 5)
    raise UserError(
        f"MODEL.CACHE_FEATURES needs an encoder that is frozen to its end, but in this "
        f"{type(encoder).__name__} {changing} change in training (MODEL.BACKBONE.FREEZE_AT is "
        f"{freeze_at}): set MODEL.BACKBONE.FREEZE_AT {last}, or {_WAY_OUT}"
    )


def _check_not_random(encoder: Backbone, modules: list[tuple[str, nn.Module]]) -> None:
    for name, module in modules:
        if rate := _drop_rate(module):
            raise UserError(
                f"MODEL.CACHE_FEATURES keeps what an encoder gives once, but '{name}' in this "
                f"{type(encoder).__name__} drops a share of {rate:g} in training, anew in every "
                f"step: build the encoder without {type(module).__name__}, or {_WAY_OUT}"
            )


def _drop_rate(module: nn.Module) -> float:
    if isinstance(module, _DropoutNd | StochasticDepth):
        return float(module.p)
    if isinstance(module, nn.MultiheadAttention):
        return float(module.dropout)
    return float(getattr(module, "drop_prob", 0.0) or 0.0)  # timm's name, and others'
