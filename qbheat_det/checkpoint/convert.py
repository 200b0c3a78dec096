# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Converts weights of other projects for this package's encoders, and downloads timm's weights.

``FORMATS`` lists the file formats. Each has a function that renames the tensors, and refuses
weights of a different network. Importing this module lets Detectron2's path manager resolve
addresses such as ``timm://resnet18.a1_in1k``. docs/architecture.md lists all sources of weights.
"""

import functools
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
import yaml
from detectron2.modeling import Backbone, build_backbone
from detectron2.utils.file_io import PathManager
from iopath.common.file_io import PathHandler, get_cache_dir
from torch import Tensor

from qbheat_det.config import get_cfg
from qbheat_det.config.loading import check_timm_name
from qbheat_det.core.errors import UserError
from qbheat_det.core.text import one_line

from .matching import fit_weights, strip_wrappers
from .mobile_former_names import convert_official, find_size
from .weights_file import WeightsInfo, read_weights, save_weights

logger = logging.getLogger(__name__)
_TIMM = "timm://"
# Depth, groups and width per group of torchvision's networks. Detectron2's ResNet gives equal
# outputs with STRIDE_IN_1X1 False.
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
# Patterns of torchvision's names, and their replacements in Detectron2.
_RESNET_NAMES = (
    (r"^(conv1|bn1)", r"stem.\1"),
    (r"^layer(\d)", lambda found: f"res{int(found[1]) + 1}"),
    (r"\bbn(\d)", r"conv\1.norm"),
    (r"downsample\.0", "shortcut"),
    (r"downsample\.1", "shortcut.norm"),
)
_State = dict[str, Tensor]
_Keys = dict[str, Any]


@dataclass(frozen=True)
class Format:
    """A format of weights: conversion function, targets, and pixel statistics of the training.

    ``convert`` takes the file's name (for messages), its tensors and the target. It returns the
    encoder's tensors and the config keys that build the encoder, or raises a ``UserError``.
    ``pretrain_only_modules`` are children that only timm's models load.
    """

    convert: Callable[[str, Mapping[str, Tensor], str], tuple[_State, _Keys]]
    targets: tuple[str, ...]
    pixel_mean: tuple[float, ...] = (123.675, 116.28, 103.53)  # of ImageNet, RGB in [0, 255]
    pixel_std: tuple[float, ...] = (58.395, 57.12, 57.375)
    pretrain_only_modules: tuple[str, ...] = ()


def convert_weights(
    weights: str, output: Path, to: str, *, overwrite: bool = False
) -> tuple[str, dict[str, Any]]:
    """Writes a copy of weights whose tensors have the names that an encoder expects.

    Args:
        weights: a ``.safetensors`` file, or a PyTorch file with only tensors.
        output: the new ``.safetensors`` file.
        to: a target of ``FORMATS``.
        overwrite: whether to replace ``output`` if it exists.

    Returns:
        A summary of the tensors, and the config keys that build the encoder.

    Raises:
        UserError: a file cannot be read or written, or the weights are of a different network.
    """
    if output.suffix != ".safetensors":
        raise UserError(f"'{output}' is not a valid output file: its name must end in .safetensors")
    if output.exists() and not overwrite:
        raise UserError(f"'{output}' exists: name another file, or add --overwrite")
    source = next((each for each in FORMATS if to in each.targets), None)
    if source is None:
        targets = ", ".join(name for each in FORMATS for name in each.targets)
        raise UserError(
            f"'{to}' is no encoder to convert weights for, expected one of {targets}; timm's files "
            "load into the encoder timm:<model> without conversion"
        )
    state, _ = read_weights(weights)
    state = {short: state[name] for name, short in strip_wrappers((), state).items()}
    converted, keys = source.convert(weights, state, to)
    keys |= {
        "MODEL.PIXEL_MEAN": list(source.pixel_mean),
        "MODEL.PIXEL_STD": list(source.pixel_std),
        "INPUT.FORMAT": "RGB",
    }
    info = WeightsInfo(
        pixel_format="RGB",
        pixel_mean=source.pixel_mean,
        pixel_std=source.pixel_std,
        config=_dump(keys),
        pretrain_only_modules=source.pretrain_only_modules,
    )
    save_weights(str(output), converted, info)
    return f"{len(converted)} of {len(state)} tensors", keys


def _dump(keys: Mapping[str, Any]) -> str:
    """Returns a config with only these keys, as YAML."""
    tree: dict[str, Any] = {"VERSION": 2}
    for key, value in keys.items():
        *parents, name = key.split(".")
        functools.reduce(lambda node, part: node.setdefault(part, {}), parents, tree)[name] = value
    return yaml.safe_dump(tree)


def _check_fit(weights: str, to: str, named: _State, own: Mapping[str, Tensor]) -> _State:
    """Returns the tensors that fit a network; raises a ``UserError`` if any is missing or wrong."""
    fitting, report = fit_weights(named, own, file=weights)
    if errors := report.find_errors(new_parts=False):
        raise UserError(f"'{weights}' is no {to}: {'; '.join(errors)}")
    return fitting


def _build_encoder(keys: Mapping[str, Any]) -> Backbone:
    """Builds the encoder on the meta device, as only names and shapes are needed."""
    cfg = get_cfg()
    cfg.merge_from_list([item for pair in keys.items() for item in pair])
    cfg.MODEL.BACKBONE.FREEZE_AT = 0
    with torch.device("meta"):
        return build_backbone(cfg)


def _convert_mobile_former(
    weights: str, state: Mapping[str, Tensor], to: str
) -> tuple[_State, _Keys]:
    """Converts the ImageNet weights of Mobile-Former's authors; shapes determine the size."""
    try:
        size, named = find_size(state), convert_official(state)
    except KeyError as error:
        raise UserError(
            f"'{weights}' is not a file of Mobile-Former's authors: it has no {error}"
        ) from error
    except (ArithmeticError, IndexError, RuntimeError, TypeError, ValueError) as error:
        raise UserError(
            f"'{weights}' is not a network of Mobile-Former's authors: {error}"
        ) from error
    with torch.device("meta"):
        own = timm.create_model(f"mobile_former_{size.lower()}").state_dict()
    fitting = _check_fit(weights, f"{to} {size}", named, own)
    head = ("classifier.", "neck.")
    converted = {
        f"{'decoder' if name.startswith(head) else 'backbone'}.{name}": tensor
        for name, tensor in fitting.items()
    }
    keys = {
        "MODEL.BACKBONE.NAME": to,
        "MODEL.MOBILE_FORMER.VARIANT": size,
        "MODEL.MOBILE_FORMER.OUT_FEATURES": ["s8", "s16", "s32", "s32_expanded", "tokens"],
    }
    return converted, keys


def _convert_efficientnet_lite(
    weights: str, state: Mapping[str, Tensor], to: str
) -> tuple[_State, _Keys]:
    """Converts weights of ``efficientnet_lite_pytorch``, which have timm's order and shapes."""
    with torch.device("meta"):
        own = timm.create_model(to.removeprefix("timm:")).state_dict()
    kinds, own_kinds = ([name.rpartition(".")[2] for name in names] for names in (state, own))
    if "_conv_stem.weight" not in state or kinds != own_kinds:
        raise UserError(f"'{weights}' contains no weights of EfficientNet-Lite for {to}")
    fitting = _check_fit(weights, to, dict(zip(own, state.values(), strict=True)), own)
    keys = {"MODEL.BACKBONE.NAME": to, "MODEL.TIMM.OUT_FEATURES": ["s8", "s16", "s32"]}
    kept = _build_encoder(keys).state_dict()  # without the head
    return {name: fitting[name.removeprefix("net.")] for name in kept}, keys


def rename_resnet(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Renames the tensors of torchvision's ResNets for Detectron2; leaves out the classifier."""
    renamed = {}
    for name, tensor in state.items():
        for theirs, own in _RESNET_NAMES:
            name = re.sub(theirs, own, name)
        if not name.startswith("fc."):
            renamed[name] = tensor
    return renamed


def build_resnet(name: str) -> tuple[Backbone, dict[str, Any]]:
    """Builds one of ``RESNETS`` on the meta device; returns it and the keys of its config."""
    depth, groups, width = RESNETS[name]
    keys = {
        "MODEL.BACKBONE.NAME": "build_resnet_backbone",
        "MODEL.RESNETS.DEPTH": depth,
        "MODEL.RESNETS.NUM_GROUPS": groups,
        "MODEL.RESNETS.WIDTH_PER_GROUP": width,
        "MODEL.RESNETS.RES2_OUT_CHANNELS": 64 if depth < 50 else 256,
        "MODEL.RESNETS.STRIDE_IN_1X1": False,
    }
    maps: Sequence[str] = ["res2", "res3", "res4", "res5"]
    full = {**keys, "MODEL.RESNETS.OUT_FEATURES": maps, "MODEL.RESNETS.NORM": "BN"}
    return _build_encoder(full), keys


def _convert_resnet(weights: str, state: Mapping[str, Tensor], to: str) -> tuple[_State, _Keys]:
    """Converts weights of torchvision's ResNets for Detectron2."""
    encoder, keys = build_resnet(to.removeprefix("detectron2:"))
    return _check_fit(weights, to, rename_resnet(state), encoder.state_dict()), keys


FORMATS = (
    # The authors' classifier has a hidden layer. Only timm's models load it.
    Format(_convert_mobile_former, ("MobileFormer",), pretrain_only_modules=("decoder",)),
    Format(
        _convert_efficientnet_lite,
        tuple(f"timm:tf_efficientnet_lite{number}" for number in range(5)),
        pixel_mean=(127.0,) * 3,
        pixel_std=(128.0,) * 3,
    ),
    Format(_convert_resnet, tuple(f"detectron2:{name}" for name in RESNETS)),
)


class TimmWeights(PathHandler):
    """Resolves ``timm://<model>`` and ``timm://<model>.<tag>`` to a local file.

    Weights are downloaded once, and stored in the cache folder with their pixel statistics.
    """

    def _get_supported_prefixes(self) -> list[str]:
        return [_TIMM]

    def _get_local_path(self, path: str, force: bool = False, **kwargs: Any) -> str:
        name = path.removeprefix(_TIMM)
        model_name, _, tag = name.partition(".")
        check_timm_name(model_name)
        tags = timm.list_pretrained(f"{model_name}.*")
        if tag and name not in tags:
            raise UserError(f"timm has no weights '{name}', but {', '.join(tags) or 'none'}")
        folder = Path(get_cache_dir()) / "timm"
        file = folder / f"{name}.safetensors"
        try:
            published = timm.get_pretrained_cfg(name)  # the default tag if the name has none
            tag = published.tag if published else ""
            file = folder / f"{model_name}.{tag}.safetensors"
            if file.is_file() and not force:
                return str(file)
            logger.info("Downloading timm's weights '%s' to '%s'", name, file)
            model = timm.create_model(file.stem, pretrained=True)
        except Exception as error:  # due to the name, the hub, the network or the file
            raise UserError(
                f"timm's weights '{name}' could not be downloaded ({one_line(error)}): copy "
                f"'{file.name}' from '{folder}' of another machine; `qbheat zoo list 'timm/*'` has "
                "networks whose weights are in Python's package index"
            ) from error
        own = model.pretrained_cfg
        mean, std = (tuple(255 * float(value) for value in own[key]) for key in ("mean", "std"))
        info = WeightsInfo(pixel_format="RGB", pixel_mean=mean, pixel_std=std)
        save_weights(str(file), model.state_dict(), info)
        return str(file)


PathManager.register_handler(TimmWeights())
