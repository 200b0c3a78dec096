# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Weights of torchvision and timm under the names of the package's encoders, and back for timm.

Importing this module lets Detectron2's path manager resolve ``timm://resnet18.a1_in1k``: weights
are downloaded once, and kept in Detectron2's cache with their pixel statistics.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import timm
import torch
from detectron2.modeling import Backbone, build_backbone
from detectron2.utils.file_io import PathManager
from iopath.common.file_io import PathHandler, get_cache_dir
from timm.models import adapt_input_conv
from torch import Tensor, nn

from qbheat_det.config import get_cfg
from qbheat_det.config.rules import check_timm_name
from qbheat_det.core.errors import UserError
from qbheat_det.core.text import one_line

from .matching import bare_backbone, fit_weights
from .report import LoadReport, check_complete
from .weights_file import WeightsInfo, read_weights, save_weights

logger = logging.getLogger(__name__)
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
_BLOCK = re.compile(r"res(\d+)\.(\d+)\.(conv(\d)|shortcut)\.(norm\.)?(\w+)")
_STEM = re.compile(r"stem\.conv1\.(norm\.)?(\w+)")
_PREFIX = "timm://"
_DECODER = "decoder."
_TOKENS = "tokens"  # a top-level parameter of every Mobile-Former
_LINEAR = {"classifier.weight", "classifier.bias"}
_NORM = {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}


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
        to: ``D2_PREFIX`` and one of ``RESNETS``; or ``MOBILE_FORMER`` or ``TIMM``.
        overwrite: whether ``output`` may exist.
        pixel_mean: of the training images, RGB in [0, 255]; empty for ImageNet's.
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
    if to not in {D2_PREFIX + name for name in RESNETS}:
        raise UserError(
            f"'{to}' is no encoder to convert weights for, such as {D2_PREFIX}resnet50 or one of "
            f"{', '.join(RESNETS)}; timm's files fit the encoder timm:<model> as they are"
        )
    encoder, keys = build_resnet(to.removeprefix(D2_PREFIX))
    fitting, report = _fit(weights, state, encoder, to)
    mean, std = tuple(pixel_mean) or _MEAN, tuple(pixel_std) or _STD
    info = WeightsInfo(pixel_format="RGB", pixel_mean=mean, pixel_std=std)
    save_weights(str(output), fitting, info)
    pixels = {"INPUT.FORMAT": "RGB", "MODEL.PIXEL_MEAN": mean, "MODEL.PIXEL_STD": std}
    return Conversion(len(fitting), report, {**keys, **pixels})


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
    cfg = get_cfg()
    cfg.merge_from_list([item for pair in keys.items() for item in pair])
    cfg.MODEL.RESNETS.OUT_FEATURES = ["res2", "res3", "res4", "res5"]
    cfg.MODEL.RESNETS.NORM = "BN"
    cfg.MODEL.BACKBONE.FREEZE_AT = 0
    with torch.device("meta"):  # only names and shapes are needed
        return build_backbone(cfg), keys


def _fit(
    weights: str, state: Mapping[str, Tensor], encoder: Backbone, to: str
) -> tuple[dict[str, Tensor], LoadReport]:
    own = encoder.state_dict()
    foreign = {name: torchvision_name(name) for name in own}
    theirs = {foreign[name]: tensor for name, tensor in own.items()}
    fitting, report = fit_weights(state, theirs, file=weights, optional_modules=["fc"])
    empty = [name for name, group in report.groups.items() if group.num_tensors and group.is_new]
    errors = report.find_errors(new_parts=True) + ([f"no {', '.join(empty)}"] if empty else [])
    if errors:
        raise UserError(f"'{weights}' is no {to}: {'; '.join(errors)}")
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


class TimmWeights(PathHandler):
    """Resolves ``timm://<model>`` and ``timm://<model>.<tag>`` to a local file."""

    def _get_supported_prefixes(self) -> list[str]:
        return [_PREFIX]

    def _get_local_path(self, path: str, force: bool = False, **kwargs: Any) -> str:
        name = _complete_name(path.removeprefix(_PREFIX))
        file = Path(get_cache_dir()) / "timm" / f"{name}.safetensors"
        if file.is_file() and not force:
            return str(file)
        logger.info("Downloading timm's weights '%s' to '%s'", name, file)
        try:
            model = timm.create_model(name, pretrained=True)
        except Exception as error:  # of the hub, the network or the file
            raise UserError(
                f"timm's weights '{name}' could not be downloaded ({one_line(error)}): copy "
                f"'{file}' from another machine"
            ) from error
        own = model.pretrained_cfg
        mean, std = (tuple(255 * float(value) for value in own[key]) for key in ("mean", "std"))
        info = WeightsInfo(pixel_format="RGB", pixel_mean=mean, pixel_std=std)
        save_weights(str(file), model.state_dict(), info)
        return str(file)


def _complete_name(name: str) -> str:
    """Adds timm's default tag to a name without one."""
    model, _, tag = name.partition(".")
    check_timm_name(model)
    published = timm.list_models(f"{model}.*", pretrained=True)
    if not tag:
        default = timm.models.get_pretrained_cfg(model)
        name = f"{model}.{default.tag}" if default else name
    if name not in published:
        raise UserError(
            f"timm has no weights '{name}'; for this model there are "
            f"{', '.join(published) or 'none: leave MODEL.WEIGHTS empty'}"
        )
    return name


def names_for_timm(
    state: Mapping[str, Tensor], model: nn.Module | None = None
) -> dict[str, Tensor]:
    """Renames the tensors of a model on Mobile-Former as timm's Mobile-Former has them.

    Of a classifier with a linear decoder these are the backbone and the last layer, with a
    BatchNorm before it folded in; of all other models the backbone. timm's loaders pass ``model``.
    """
    names = bare_backbone(state)
    if not names:
        return dict(state)
    return {**{short: state[name] for name, short in names.items()}, **_fold_classifier(state)}


def names_for_package(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Renames the tensors of timm's Mobile-Former as ``ImageClassifier`` has them.

    The result is empty if it is no Mobile-Former; names may have a common prefix.
    """
    prefixes = [name.removesuffix(_TOKENS) for name in state if name.endswith(_TOKENS)]
    if len(prefixes) != 1 or f"{prefixes[0]}stem.weight" not in state:
        return {}
    inside = {n.removeprefix(prefixes[0]): t for n, t in state.items() if n.startswith(prefixes[0])}
    return {
        f"{_DECODER if name.startswith('classifier.') else 'backbone.'}{name}": tensor
        for name, tensor in inside.items()
    }


def _fold_classifier(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    decoder = {n.partition(_DECODER)[2]: tensor for n, tensor in state.items() if _DECODER in n}
    if not set(decoder) >= _LINEAR or not set(decoder) <= _LINEAR | _NORM:
        return {}  # a transformer decoder, or none
    weight, bias = decoder["classifier.weight"], decoder["classifier.bias"]
    if "norm.running_var" in decoder:
        scale = (decoder["norm.running_var"].double() + nn.BatchNorm1d(1).eps).rsqrt()
        folded = weight.double() * scale
        bias = (bias.double() - folded @ decoder["norm.running_mean"].double()).to(bias.dtype)
        weight = folded.to(weight.dtype)
    return {"classifier.weight": weight, "classifier.bias": bias}


def load_into_timm_model(model: nn.Module, settings: dict[str, Any] | None, path: str) -> None:
    """Loads a file of this package into timm's Mobile-Former, which takes RGB images in [0, 1].

    The classifier is loaded if the file has one of the same shape, and else left as it is; mean and
    std of ``settings``, timm's ``pretrained_cfg``, become those of the file.

    Raises:
        UserError: the file cannot be read, or its backbone does not fit.
    """
    state, info = read_weights(path)
    stored = {name: tensor.float() for name, tensor in names_for_timm(state).items()}
    own = model.state_dict()
    for name in _LINEAR & set(stored):
        if name not in own or stored[name].shape != own[name].shape:
            del stored[name]
    is_bgr = info is not None and info.pixel_format == "BGR"
    if "stem.weight" in stored and "stem.weight" in own:
        stem = stored["stem.weight"].flip(1) if is_bgr else stored["stem.weight"]
        if stem.shape[1] != own["stem.weight"].shape[1]:
            stem = adapt_input_conv(own["stem.weight"].shape[1], stem)
        stored["stem.weight"] = stem
    fitting, report = fit_weights(stored, own, file=path)
    check_complete(report)
    model.load_state_dict(fitting, strict=False)
    logger.info("Loaded '%s': %s", path, report)
    if info is not None and info.pixel_mean and info.pixel_std and settings is not None:
        order = slice(None, None, -1 if is_bgr else 1)
        settings["mean"] = tuple(value / 255 for value in info.pixel_mean[order])
        settings["std"] = tuple(value / 255 for value in info.pixel_std[order])


PathManager.register_handler(TimmWeights())
