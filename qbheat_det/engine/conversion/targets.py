# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Encoders that weights can be converted for, and the config keys that build them."""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import timm
import torch
from detectron2.modeling import Backbone, build_backbone

from qbheat_det.checkpoint.resnet_names import torchvision_name
from qbheat_det.config import get_cfg
from qbheat_det.config.rules import TIMM_PREFIX, check_timm_name
from qbheat_det.core.errors import UserError
from qbheat_det.modeling.backbone import TimmBackbone

D2_PREFIX = "detectron2:"
# Depth, groups and width of a group, as torchvision names these networks.
RESNETS: dict[str, tuple[int, int, int]] = {
    "resnet18": (18, 1, 64),
    "resnet34": (34, 1, 64),
    "resnet50": (50, 1, 64),
    "resnet101": (101, 1, 64),
    "resnet152": (152, 1, 64),
    "resnext50_32x4d": (50, 32, 4),
    "resnext101_32x8d": (101, 32, 8),
    "wide_resnet50_2": (50, 1, 128),
    "wide_resnet101_2": (101, 1, 128),
}
"""Networks that Detectron2's ResNet is equal to, with convolutions of stride 2 that are 3x3."""

# The channels' statistics of ImageNet, RGB, of images in 0 … 255.
_MEAN, _STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
_PROBED_STRIDES = ("s2", "s4", "s8", "s16", "s32")


@dataclass(frozen=True)
class Target:
    """An encoder, and how files from elsewhere speak of it.

    Attributes:
        name: as it is asked for.
        encoder: all that leads to its coarsest map; its weights mean nothing.
        foreign_name: from a name of the encoder's to the file's.
        unused: beginnings of the file's names that the encoder has no use for.
        keys: of the config that builds it.
        pixel_mean: what weights of that name are trained with, unless something else is said: mean
            of each channel, RGB, of images in 0 … 255.
        pixel_std: standard deviations, likewise.
    """

    name: str
    encoder: Backbone
    foreign_name: Callable[[str], str]
    unused: tuple[str, ...]
    keys: Mapping[str, Any]
    pixel_mean: tuple[float, ...] = _MEAN
    pixel_std: tuple[float, ...] = _STD


def find_target(name: str) -> Target:
    """Builds the encoder of a name.

    Args:
        name: "detectron2:resnet50" and the other ``RESNETS``, or "timm:<model>", where the tag of
            weights may follow, for their normalisation.

    Raises:
        UserError: there is no such encoder.
    """
    if name.startswith(D2_PREFIX):
        return _find_resnet(name)
    if name.startswith(TIMM_PREFIX):
        return _find_timm(name)
    raise UserError(
        f"'{name}' is no encoder to convert weights for: name timm:<model>, such as timm:resnet18, "
        f"or {D2_PREFIX}<ResNet>, such as {D2_PREFIX}resnet50"
    )


def _find_resnet(name: str) -> Target:
    short = name.removeprefix(D2_PREFIX)
    if short not in RESNETS:
        near = difflib.get_close_matches(short, RESNETS, n=3, cutoff=0.3) or [*RESNETS]
        raise UserError(
            f"Detectron2's ResNet is not '{short}'; did you mean "
            f"{', '.join(D2_PREFIX + other for other in near)}?"
        )
    depth, groups, width = RESNETS[short]
    keys = {
        "MODEL.BACKBONE.NAME": "build_resnet_backbone",
        "MODEL.RESNETS.DEPTH": depth,
        "MODEL.RESNETS.NUM_GROUPS": groups,
        "MODEL.RESNETS.WIDTH_PER_GROUP": width,
        "MODEL.RESNETS.RES2_OUT_CHANNELS": 64 if depth < 50 else 256,
        "MODEL.RESNETS.STRIDE_IN_1X1": False,
    }
    cfg = get_cfg()
    for key, value in keys.items():
        cfg.merge_from_list([key, value])
    cfg.MODEL.RESNETS.OUT_FEATURES = ["res2", "res3", "res4", "res5"]
    cfg.MODEL.RESNETS.NORM = "BN"
    cfg.MODEL.BACKBONE.FREEZE_AT = 0
    with torch.device("meta"):  # names and shapes are all that is asked of it
        encoder = build_backbone(cfg)
    return Target(name, encoder, torchvision_name, ("fc.",), keys)


def _find_timm(name: str) -> Target:
    model, _, tag = name.removeprefix(TIMM_PREFIX).partition(".")
    check_timm_name(model)
    encoder = _build_whole(model)
    unused = tuple(f"{child.removeprefix('net.')}." for child in encoder.optional_modules)
    published = [
        other.partition(".")[2] for other in timm.list_models(f"{model}.*", pretrained=True)
    ]
    if tag and tag not in published:
        raise UserError(
            f"timm knows no weights '{model}.{tag}', whose normalisation was to be taken: it knows "
            f"{', '.join(published) or 'none'}"
        )
    cfg = timm.get_pretrained_cfg(f"{model}.{tag}" if tag else model)
    return Target(
        name=name,
        encoder=encoder,
        foreign_name=lambda own: own.removeprefix("net."),
        unused=unused,
        keys={"MODEL.BACKBONE.NAME": f"{TIMM_PREFIX}{model}"},
        pixel_mean=tuple(round(255 * value, 6) for value in cfg.mean) if cfg else _MEAN,
        pixel_std=tuple(round(255 * value, 6) for value in cfg.std) if cfg else _STD,
    )


def _build_whole(model: str) -> TimmBackbone:
    """Builds timm's network up to its coarsest map."""
    for stride in reversed(_PROBED_STRIDES):
        try:
            return TimmBackbone(name=model, out_features=[stride])
        except ValueError:  # no map at this stride
            continue
    raise UserError(f"timm's '{model}' gives no map at a stride of 2 to 32")
