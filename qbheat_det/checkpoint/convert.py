# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Converts weights of torchvision and timm for the package's encoders, and back for timm."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import timm
import torch
from detectron2.modeling import Backbone, build_backbone
from torch import Tensor

from qbheat_det.config import get_cfg
from qbheat_det.config.loading import TIMM_PREFIX, check_timm_name
from qbheat_det.core.errors import UserError
from qbheat_det.core.text import join_first
from qbheat_det.modeling.contracts import optional_modules

from .matching import bare_backbone, fit_weights
from .report import LoadReport
from .timm_weights import names_for_package, names_for_timm
from .weights_file import WeightsInfo, read_weights, save_weights

D2_PREFIX = "detectron2:"
MOBILE_FORMER, TIMM = "MobileFormer", "timm"
"""Targets that only rename: from timm's Mobile-Former to this package, and the other way."""
# torchvision's names of networks that Detectron2's ResNet equals with STRIDE_IN_1X1 off: depth,
# groups and width of a group.
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
# Statistics of ImageNet's channels, RGB in [0, 255].
_MEAN, _STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
_STRIDES = ("s2", "s4", "s8", "s16", "s32")
_BLOCK = re.compile(r"res(\d+)\.(\d+)\.(conv(\d)|shortcut)\.(norm\.)?(\w+)")
_STEM = re.compile(r"stem\.conv1\.(norm\.)?(\w+)")


@dataclass(frozen=True)
class Target:
    """An encoder up to its coarsest map, and how files from elsewhere name its tensors.

    ``foreign_name`` maps a name in the encoder to one in the file, ``unused`` are modules that the
    encoder lacks, and ``keys`` of a config build it. Pixel statistics are RGB in [0, 255].
    """

    name: str
    encoder: Backbone
    foreign_name: Callable[[str], str]
    unused: tuple[str, ...]
    keys: Mapping[str, Any]
    pixel_mean: tuple[float, ...] = _MEAN
    pixel_std: tuple[float, ...] = _STD


@dataclass(frozen=True)
class Conversion:
    """Outcome of a conversion; without ``report`` and ``keys`` if only names were changed.

    ``keys`` of a config build the encoder and set its pixel statistics.
    """

    num_tensors: int
    report: LoadReport | None = None
    keys: Mapping[str, Any] = field(default_factory=dict)


def convert_weights(
    weights: str,
    output: Path,
    to: str,
    *,
    overwrite: bool = False,
    pixel_mean: Sequence[float] = (),
    pixel_std: Sequence[float] = (),
) -> Conversion:
    """Writes weights under the names of an encoder.

    Args:
        weights: ``.safetensors``, or PyTorch's format with tensors only.
        output: a ``.safetensors``.
        to: an encoder, see ``find_target``; or ``MOBILE_FORMER`` or ``TIMM``.
        overwrite: whether ``output`` may exist.
        pixel_mean: of the training images, RGB in [0, 255]; empty for the encoder's default.
        pixel_std: as ``pixel_mean``.

    Raises:
        UserError: the file cannot be read, is of another network, or cannot be written.
    """
    if output.suffix != ".safetensors" or output.is_dir():
        raise UserError(f"'{output}' is no name for the new file: it must end in .safetensors")
    if output.exists() and not overwrite:
        raise UserError(f"'{output}' exists: name another file, or ask for it with --overwrite")
    if pixel_mean and 0 <= min(pixel_mean) and max(pixel_mean) <= 1:
        raise UserError(f"--pixel-mean {list(pixel_mean)} is of images in [0, 1]: multiply by 255")
    state, info = read_weights(weights)
    if to in (MOBILE_FORMER, TIMM):
        renamed = _rename(weights, state, info, to)
        save_weights(str(output), renamed, info or WeightsInfo())
        return Conversion(len(renamed))
    target = find_target(to)
    fitting, report = _fit(weights, state, target)
    mean = tuple(pixel_mean) or target.pixel_mean
    std = tuple(pixel_std) or target.pixel_std
    info = WeightsInfo(pixel_format="RGB", pixel_mean=mean, pixel_std=std)
    save_weights(str(output), fitting, info)
    pixels = {"INPUT.FORMAT": "RGB", "MODEL.PIXEL_MEAN": mean, "MODEL.PIXEL_STD": std}
    return Conversion(len(fitting), report, {**target.keys, **pixels})


def find_target(name: str) -> Target:
    """Builds an encoder: "detectron2:resnet50" or another of ``RESNETS``, or "timm:<model>".

    A tag after timm's model names the pixel statistics.
    """
    if name.startswith(D2_PREFIX):
        return _build_resnet(name)
    if name.startswith(TIMM_PREFIX):
        return _build_timm(name)
    raise UserError(
        f"'{name}' is no encoder to convert weights for, such as timm:resnet18 or "
        f"{D2_PREFIX}resnet50"
    )


def torchvision_name(name: str) -> str:
    """Returns "layer1.0.bn1.weight" for "res2.0.conv1.norm.weight" of Detectron2's ResNet."""
    if found := _STEM.fullmatch(name):
        norm, kind = found.groups()
        return f"{'bn1' if norm else 'conv1'}.{kind}"
    found = _BLOCK.fullmatch(name)
    assert found, name
    stage, block, _, number, norm, kind = found.groups()
    convolution = f"{'bn' if norm else 'conv'}{number}"
    part = convolution if number else f"downsample.{1 if norm else 0}"
    return f"layer{int(stage) - 1}.{block}.{part}.{kind}"


def _build_resnet(name: str) -> Target:
    short = name.removeprefix(D2_PREFIX)
    if short not in RESNETS:
        raise UserError(f"Detectron2's ResNet is not '{short}' but one of {', '.join(RESNETS)}")
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
    cfg.merge_from_list([item for pair in keys.items() for item in pair])
    cfg.MODEL.RESNETS.OUT_FEATURES = ["res2", "res3", "res4", "res5"]
    cfg.MODEL.RESNETS.NORM = "BN"
    cfg.MODEL.BACKBONE.FREEZE_AT = 0
    with torch.device("meta"):  # only names and shapes are needed
        return Target(name, build_backbone(cfg), torchvision_name, ("fc",), keys)


def _build_timm(name: str) -> Target:
    model, _, tag = name.removeprefix(TIMM_PREFIX).partition(".")
    check_timm_name(model)
    tags = [found.partition(".")[2] for found in timm.list_models(f"{model}.*", pretrained=True)]
    if tag and tag not in tags:
        raise UserError(f"timm has no weights '{model}.{tag}' but {join_first(tags, 9) or 'none'}")
    keys = {"MODEL.BACKBONE.NAME": f"{TIMM_PREFIX}{model}"}
    cfg = get_cfg()
    cfg.MODEL.BACKBONE.NAME, cfg.MODEL.BACKBONE.FREEZE_AT = keys["MODEL.BACKBONE.NAME"], 0
    settings = timm.get_pretrained_cfg(f"{model}.{tag}" if tag else model)
    for stride in reversed(_STRIDES):
        cfg.MODEL.TIMM.OUT_FEATURES = [stride]
        try:
            encoder: Backbone = build_backbone(cfg)
        except ValueError:  # no map at this stride
            continue
        return Target(
            name=name,
            encoder=encoder,
            foreign_name=lambda own: own.removeprefix("net."),
            unused=tuple(child.removeprefix("net.") for child in optional_modules(encoder)),
            keys=keys,
            pixel_mean=tuple(round(255 * v, 6) for v in settings.mean) if settings else _MEAN,
            pixel_std=tuple(round(255 * v, 6) for v in settings.std) if settings else _STD,
        )
    raise UserError(f"timm's '{model}' gives no map at a stride of 2 to 32")


def _fit(
    weights: str, state: Mapping[str, Tensor], target: Target
) -> tuple[dict[str, Tensor], LoadReport]:
    own = target.encoder.state_dict()
    foreign = {name: target.foreign_name(name) for name in own}
    fitting, report = fit_weights(
        state,
        {foreign[name]: tensor for name, tensor in own.items()},
        file=weights,
        optional_modules=target.unused,
    )
    empty = [name for name, group in report.groups.items() if group.num_tensors and group.is_new]
    errors = report.find_errors(new_parts=True) + ([f"no {', '.join(empty)}"] if empty else [])
    if errors:
        raise UserError(f"'{weights}' is no {target.name}: {'; '.join(errors)}")
    return {name: fitting[key] for name, key in foreign.items() if key in fitting}, report


def _rename(
    weights: str, state: Mapping[str, Tensor], info: WeightsInfo | None, to: str
) -> dict[str, Tensor]:
    if to == MOBILE_FORMER:
        renamed = names_for_package(state)
    elif info is not None and info.pixel_format == "BGR":
        raise UserError(
            f"'{weights}' was trained on BGR images, and timm reads RGB: load it in timm by "
            "pretrained_cfg_overlay={'file': …, 'custom_load': True}, which flips the channels"
        )
    else:
        inside = bare_backbone(state) or {name: name for name in state}
        if all(short.startswith("net.") for short in inside.values()):  # of ``TimmBackbone``
            renamed = {short.removeprefix("net."): state[name] for name, short in inside.items()}
        else:
            renamed = names_for_timm(state) if "tokens" in inside.values() else {}
    if not renamed:
        source = "timm's Mobile-Former" if to == MOBILE_FORMER else "an encoder of this package"
        raise UserError(f"'{weights}' holds no weights of {source}")
    return renamed
