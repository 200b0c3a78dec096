# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The package's weights in a Mobile-Former that timm has built."""

import logging
from collections.abc import Mapping
from typing import Any

from timm.models import adapt_input_conv
from torch import Tensor, nn

from qbheat_det.checkpoint import bare_backbone, fit_weights, read_weights
from qbheat_det.checkpoint.checkpointer import check_promise

logger = logging.getLogger(__name__)
_DECODER = "decoder."
_TOKENS = "tokens"  # a parameter that every Mobile-Former has, at its top


def names_for_timm(
    state: Mapping[str, Tensor], model: nn.Module | None = None
) -> dict[str, Tensor]:
    """Gives the tensors of a model of the package the names that they have in timm's.

    Of a classifier with a linear decoder they are the backbone's and the last layer's, into which
    a BatchNorm before it is folded; of all other models the backbone's alone. What is of timm's
    names already stays as it is.

    Args:
        state: tensors by name.
        model: without meaning here; timm's loaders hand it over.
    """
    names = bare_backbone(state)
    if not names:
        return dict(state)
    return {**{short: state[name] for name, short in names.items()}, **_linear_layer(state)}


def names_for_package(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gives the tensors of a Mobile-Former that timm has built the names of an ``ImageClassifier``.

    Args:
        state: tensors by name, with or without a prefix of all.

    Returns:
        The backbone's as "backbone.…", which every model on it takes over, and of the classifier
        "decoder.classifier.…"; nothing where there is no such network.
    """
    prefixes = [name.removesuffix(_TOKENS) for name in state if name.endswith(_TOKENS)]
    if len(prefixes) != 1:
        return {}
    inside = {
        name.removeprefix(prefixes[0]): tensor
        for name, tensor in state.items()
        if name.startswith(prefixes[0])
    }
    if "stem.weight" not in inside:
        return {}
    return {
        f"{_DECODER if name.startswith('classifier.') else 'backbone.'}{name}": tensor
        for name, tensor in inside.items()
    }


def _linear_layer(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    decoder = {
        name.partition(_DECODER)[2]: tensor for name, tensor in state.items() if _DECODER in name
    }
    known = {"classifier.weight", "classifier.bias", "norm.running_mean", "norm.running_var"}
    if not {"classifier.weight", "classifier.bias"} <= set(decoder) or any(
        name not in known and not name.endswith("num_batches_tracked") for name in decoder
    ):
        return {}  # of a transformer decoder, or there is none
    weight, bias = decoder["classifier.weight"], decoder["classifier.bias"]
    if "norm.running_var" in decoder:
        scale = (decoder["norm.running_var"].double() + nn.BatchNorm1d(1).eps).rsqrt()
        folded = weight.double() * scale
        bias = (bias.double() - folded @ decoder["norm.running_mean"].double()).to(bias.dtype)
        weight = folded.to(weight.dtype)
    return {"classifier.weight": weight, "classifier.bias": bias}


def load_into(model: nn.Module, path: str) -> None:
    """Loads a file of the package into a ``TimmMobileFormer``; timm gives RGB images in [0, 1].

    The classifier is taken over where the file has one of as many classes on the same features;
    else it stays as it is. ``model.pretrained_cfg`` tells the file's normalisation afterwards.

    Raises:
        UserError: the file cannot be read, or its backbone does not fit.
    """
    state, info = read_weights(path)
    stored = {name: tensor.float() for name, tensor in names_for_timm(state).items()}
    own = model.state_dict()
    for name in ("classifier.weight", "classifier.bias"):
        if name in stored and (name not in own or stored[name].shape != own[name].shape):
            del stored[name]
    is_bgr = info is not None and info.pixel_format == "BGR"
    if "stem.weight" in stored and "stem.weight" in own:
        stem = stored["stem.weight"].flip(1) if is_bgr else stored["stem.weight"]
        if stem.shape[1] != own["stem.weight"].shape[1]:
            stem = adapt_input_conv(own["stem.weight"].shape[1], stem)
        stored["stem.weight"] = stem
    fitting, report = fit_weights(stored, own, file=path)
    check_promise(report, allow_partial=False)
    model.load_state_dict(fitting, strict=False)
    logger.info("Loaded '%s': %s", path, report)
    settings: dict[str, Any] | None = getattr(model, "pretrained_cfg", None)
    if info is not None and info.pixel_mean and info.pixel_std and settings is not None:
        order = slice(None, None, -1 if is_bgr else 1)
        settings["mean"] = tuple(value / 255 for value in info.pixel_mean[order])
        settings["std"] = tuple(value / 255 for value in info.pixel_std[order])
