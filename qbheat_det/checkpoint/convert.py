# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Converts weights from elsewhere for the package's encoders.

``FORMATS`` lists the formats. Each is one function that checks the names and shapes of the tensors,
refuses weights of another network, and renames the tensors. docs/architecture.md lists the weights
that need no conversion.
"""

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
import yaml
from detectron2.modeling import Backbone, build_backbone
from torch import Tensor

from qbheat_det.config import get_cfg
from qbheat_det.core.errors import UserError

from .matching import check_finite, fit_weights, strip_wrappers
from .official_mobile_former import convert_official, find_size
from .weights_file import WeightsInfo, read_weights, save_weights

MOBILE_FORMER = "MobileFormer"
EFFICIENTNET_LITE = "timm:tf_efficientnet_lite"
D2_PREFIX = "detectron2:"
# Depth, groups and width per group of torchvision's networks. Detectron2's ResNet computes the same
# with STRIDE_IN_1X1 off.
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
# Channel statistics of ImageNet, RGB in [0, 255].
_MEAN, _STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
_BLOCK = re.compile(r"res(\d+)\.(\d+)\.(conv(\d)|shortcut)\.(norm\.)?(\w+)")
_STEM = re.compile(r"stem\.conv1\.(norm\.)?(\w+)")


@dataclass(frozen=True)
class Converted:
    """Renamed tensors of an encoder.

    ``account`` is the message for the user, ``keys`` the config keys that build the encoder.
    """

    state: dict[str, Tensor]
    account: str
    keys: dict[str, Any]


@dataclass(frozen=True)
class Format:
    """A format of weights: its targets, its function and the pixel statistics of its training.

    ``convert`` takes the file's name (for messages), its tensors and the target, and raises a
    ``UserError`` for weights of another network. ``pretrain_only_modules`` are children that only
    timm's models load.
    """

    convert: Callable[[str, Mapping[str, Tensor], str], Converted]
    targets: tuple[str, ...]
    pixel_mean: tuple[float, ...] = _MEAN
    pixel_std: tuple[float, ...] = _STD
    pretrain_only_modules: tuple[str, ...] = ()


def convert_weights(
    weights: str,
    output: Path,
    to: str,
    *,
    overwrite: bool = False,
    pixel_mean: Sequence[float] = (),
    pixel_std: Sequence[float] = (),
) -> tuple[str, dict[str, Any]]:
    """Writes weights under the names of an encoder.

    Args:
        weights: a ``.safetensors`` file, or a file of PyTorch that holds only tensors.
        output: the new ``.safetensors`` file.
        to: a target of ``FORMATS``.
        overwrite: whether to replace ``output`` if it exists.
        pixel_mean: of the training images, RGB in [0, 255]; empty for the format's values.
        pixel_std: like ``pixel_mean``.

    Returns:
        A summary of the tensors, and the config keys that build the encoder.

    Raises:
        UserError: the file cannot be read or written, or holds another network.
    """
    _check_arguments(output, overwrite, pixel_mean, pixel_std)
    source = next((each for each in FORMATS if to in each.targets), None)
    if source is None:
        targets = ", ".join(name for each in FORMATS for name in each.targets)
        raise UserError(
            f"'{to}' is no encoder to convert weights for, expected one of {targets}; timm's files "
            "load into the encoder timm:<model> without conversion"
        )
    state, _ = read_weights(weights)
    converted = source.convert(weights, state, to)
    mean, std = tuple(pixel_mean) or source.pixel_mean, tuple(pixel_std) or source.pixel_std
    pixels = {"MODEL.PIXEL_MEAN": list(mean), "MODEL.PIXEL_STD": list(std), "INPUT.FORMAT": "RGB"}
    keys = converted.keys | pixels
    info = WeightsInfo(
        pixel_format="RGB",
        pixel_mean=mean,
        pixel_std=std,
        config=_dump(keys),
        pretrain_only_modules=source.pretrain_only_modules,
    )
    save_weights(str(output), converted.state, info)
    return converted.account, keys


def _check_arguments(
    output: Path, overwrite: bool, pixel_mean: Sequence[float], pixel_std: Sequence[float]
) -> None:
    if output.suffix != ".safetensors" or output.is_dir():
        raise UserError(f"'{output}' is not a valid output file: its name must end in .safetensors")
    if output.exists() and not overwrite:
        raise UserError(f"'{output}' exists: name another file, or add --overwrite")
    for flag, values in (("--pixel-mean", pixel_mean), ("--pixel-std", pixel_std)):
        if values and (len(values) != 3 or not all(map(math.isfinite, values))):
            raise UserError(f"{flag} {list(values)} are not three numbers")
        if values and 0 < max(values) < 1:
            raise UserError(f"{flag} {list(values)} is for images in [0, 1]: multiply by 255")
    if pixel_std and min(pixel_std) <= 0:
        raise UserError(f"--pixel-std {list(pixel_std)} has a value that is not positive")


def _dump(keys: Mapping[str, Any]) -> str:
    """Returns a config of these keys alone as YAML."""
    tree: dict[str, Any] = {"VERSION": 2}
    for key, value in keys.items():
        *parents, name = key.split(".")
        functools.reduce(lambda node, part: node.setdefault(part, {}), parents, tree)[name] = value
    return yaml.safe_dump(tree)


def _convert_mobile_former(weights: str, state: Mapping[str, Tensor], to: str) -> Converted:
    """Converts the ImageNet weights of Mobile-Former's authors; the tensors tell the size."""
    state = {short: state[name] for name, short in strip_wrappers((), state.keys()).items()}
    if not {"tokens.weight", "stem.0.weight", "features.0.conv.0.weight"} <= state.keys():
        raise UserError(f"'{weights}' is not a file of Mobile-Former's authors")
    try:
        size, named = find_size(state), convert_official(state)
    except KeyError as error:
        raise UserError(f"'{weights}' is incomplete: it has no {error}") from error
    except (ArithmeticError, IndexError, RuntimeError, TypeError, ValueError) as error:
        raise UserError(
            f"'{weights}' is not a network of Mobile-Former's authors: {error}"
        ) from error
    with torch.device("meta"):  # only names and shapes are needed
        own = timm.create_model(f"mobile_former_{size.lower()}").state_dict()
    fitting, report = fit_weights(named, own, file=weights)
    if errors := report.find_errors(new_parts=False):
        raise UserError(f"'{weights}' is no {MOBILE_FORMER} {size}: {'; '.join(errors)}")
    head = ("classifier.", "neck.")
    converted = {
        f"{'decoder' if name.startswith(head) else 'backbone'}.{name}": tensor
        for name, tensor in fitting.items()
    }
    keys = {
        "MODEL.BACKBONE.NAME": MOBILE_FORMER,
        "MODEL.MOBILE_FORMER.VARIANT": size,
        "MODEL.MOBILE_FORMER.OUT_FEATURES": ["s8", "s16", "s32", "s32_expanded", "tokens"],
    }
    left = len(state) - len(named)
    return Converted(converted, f"{len(converted)} of {len(state)} tensors, {left} not used", keys)


def _convert_efficientnet_lite(weights: str, state: Mapping[str, Tensor], to: str) -> Converted:
    """Converts weights of ``efficientnet_lite_pytorch``, which has timm's order and shapes."""
    model = to.removeprefix("timm:")
    state = {short: state[name] for name, short in strip_wrappers((), state.keys()).items()}
    check_finite(state, weights)
    if "_conv_stem.weight" not in state:
        raise UserError(f"'{weights}' holds no weights of EfficientNet-Lite for {to}")
    with torch.device("meta"):  # only names and shapes are needed
        own = timm.create_model(model).state_dict()
    theirs, ours = (
        [(name.rpartition(".")[2], tensor.shape) for name, tensor in tensors.items()]
        for tensors in (state, own)
    )
    if theirs != ours:
        raise UserError(f"'{weights}' is of another size than {model}, or in another order")
    keys = {"MODEL.BACKBONE.NAME": to, "MODEL.TIMM.OUT_FEATURES": ["s8", "s16", "s32"]}
    kept = _build_encoder(keys).state_dict()  # without the head
    named = {f"net.{name}": tensor for name, tensor in zip(own, state.values(), strict=True)}
    converted = {name: named[name] for name in kept}
    return Converted(converted, f"{len(converted)} of {len(named)} tensors", keys)


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


def build_resnet(name: str) -> tuple[Backbone, dict[str, Any]]:
    """Builds one of ``RESNETS`` without values; returns it with the keys of its config."""
    depth, groups, width = RESNETS[name]
    keys = {
        "MODEL.BACKBONE.NAME": "build_resnet_backbone",
        "MODEL.RESNETS.DEPTH": depth,
        "MODEL.RESNETS.NUM_GROUPS": groups,
        "MODEL.RESNETS.WIDTH_PER_GROUP": width,
        "MODEL.RESNETS.RES2_OUT_CHANNELS": 64 if depth < 50 else 256,
        "MODEL.RESNETS.STRIDE_IN_1X1": False,
    }
    maps = ["res2", "res3", "res4", "res5"]
    full = {**keys, "MODEL.RESNETS.OUT_FEATURES": maps, "MODEL.RESNETS.NORM": "BN"}
    return _build_encoder(full), keys


def _build_encoder(keys: Mapping[str, Any]) -> Backbone:
    """Builds the encoder of a config without values: only names and shapes are needed."""
    cfg = get_cfg()
    cfg.merge_from_list([item for pair in keys.items() for item in pair])
    cfg.MODEL.BACKBONE.FREEZE_AT = 0
    with torch.device("meta"):
        return build_backbone(cfg)


def _convert_resnet(weights: str, state: Mapping[str, Tensor], to: str) -> Converted:
    """Converts weights of torchvision's ResNets for Detectron2's; the classifier is left out."""
    encoder, keys = build_resnet(to.removeprefix(D2_PREFIX))
    own = encoder.state_dict()
    foreign = {name: torchvision_name(name) for name in own}
    theirs = {foreign[name]: tensor for name, tensor in own.items()}
    fitting, report = fit_weights(state, theirs, file=weights, optional_modules=["fc"])
    empty = [name for name, group in report.groups.items() if group.num_tensors and group.is_new]
    errors = report.find_errors(new_parts=True) + ([f"no {', '.join(empty)}"] if empty else [])
    if errors:
        raise UserError(f"'{weights}' is no {to}: {'; '.join(errors)}")
    named = {name: fitting[key] for name, key in foreign.items() if key in fitting}
    return Converted(named, str(report), keys)


FORMATS = (
    # Models other than timm's skip the authors' classifier, which has a hidden layer.
    Format(_convert_mobile_former, (MOBILE_FORMER,), pretrain_only_modules=("decoder",)),
    Format(
        _convert_efficientnet_lite,
        tuple(f"{EFFICIENTNET_LITE}{number}" for number in range(5)),
        pixel_mean=(127.0,) * 3,
        pixel_std=(128.0,) * 3,
    ),
    Format(_convert_resnet, tuple(D2_PREFIX + name for name in RESNETS)),
)
