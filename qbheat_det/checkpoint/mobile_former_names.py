# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Renames Mobile-Former's tensors, of this package or of the paper's authors, to timm's names.

The authors' networks (github.com/AAboys/MobileFormer) are "508M" to "26M" of
``MOBILE_FORMER_ARCHS``. The smallest one has grouped 1x1 convolutions and channel shuffles. Here
they become dense convolutions with reordered channels, without shuffles and with equal outputs.
"""

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from timm.models import adapt_input_conv
from torch import Tensor, nn

from .matching import bare_backbone, fit_weights
from .report import check_complete
from .weights_file import read_weights

logger = logging.getLogger(__name__)
_DECODER = "decoder."
_LINEAR = {"classifier.weight", "classifier.bias"}
_NORM = {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
# Maps module names of the authors' networks to timm's names, for blocks by kind of block. Each
# convolution "name.N" has a BatchNorm "name.N+1". "hyperN" has the two layers of a dynamic ReLU.
_MF_STEM = {"tokens.weight": "tokens", "stem.0.weight": "stem.weight"}
_MF_ATTENTION = {
    "local_global.q": "mobile_to_former.query",
    "local_global.alpha.0": "mobile_to_former.gate",
    "local_global.proj": "mobile_to_former.project",
    "local_global.layer_norm": "mobile_to_former.norm",
    "global_block.q": "former.query",
    "global_block.channel_mlp": "former.project",
    "global_block.layer_norm": "former.attention_norm",
    "global_block.ffn.0": "former.mlp.0",
    "global_block.ffn.2": "former.mlp.2",
    "global_block.ffn_norm": "former.mlp_norm",
    "global_local.k": "former_to_mobile.key",
    "global_local.proj": "former_to_mobile.value",
}
_MF_BLOCKS = {
    "lite": {"conv.0": "depthwise", "conv.4": "pointwise"},
    "down": {
        "conv1.0": "mobile.down",
        "hyper1": "mobile.down_act",
        "conv2.0": "mobile.down_reduce",
        "conv3.0": "mobile.depthwise",
        "hyper3": "mobile.depthwise_act",
        "conv4.0": "mobile.reduce",
    },
    "plain": {
        "conv1.0": "mobile.expand",
        "hyper1": "mobile.expand_act",
        "conv2.0": "mobile.depthwise",
        "hyper2": "mobile.depthwise_act",
        "conv3.0": "mobile.reduce",
    },
}
_MF_HEAD = {
    "classifier.conv.1": "expand",
    "classifier.conv.2": "expand.norm",
    "classifier.fc.0": "neck.0",
    "classifier.fc.1": "neck.1",
    "classifier.classifier.1": "classifier",
}


def find_size(state: Mapping[str, Tensor]) -> str:
    """Returns the key in ``MOBILE_FORMER_ARCHS`` of the network with these (authors') weights."""
    tokens, expanded = len(state["tokens.weight"]), len(state["classifier.conv.1.weight"])
    sizes = {1440: "508M", 1152: "294M", 960: "214M", 768: "151M" if tokens == 6 else "96M"}
    return sizes.get(expanded, "52M" if _count_groups(state) == 1 else "26M")


def convert_official(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Renames the authors' weights to the names of timm's ``mobile_former_508m`` to ``_26m``.

    Raises a ``KeyError`` if a tensor that identifies the kind of a block is missing.
    """
    weights = dict(state)
    groups = _count_groups(state)
    modules = {"stem.1": "stem.norm", **_MF_HEAD}
    modules |= {k: v.replace("mobile_to_former", "last_bridge") for k, v in _MF_ATTENTION.items()}
    channels, stage, place = len(state["stem.0.weight"]), 0, 0
    for index in range(1 + max(int(n.split(".")[1]) for n in state if n.startswith("features."))):
        own = f"features.{index}."
        last = {kind: f"{own}{[*parts][-1]}.weight" for kind, parts in _MF_BLOCKS.items()}
        kind = next((kind for kind, name in last.items() if name in state), "")
        if not kind:
            raise KeyError(" or ".join(last.values()))
        out = len(state[last[kind]])
        if kind == "down" or (kind == "lite" and out != channels):
            stage, place = stage + 1, 0
        if groups > 1:
            _undo_groups(weights, own, kind, channels, groups)
        modules |= {f"{own}{k}": f"stages.{stage}.{place}.{v}" for k, v in _name_modules(kind)}
        channels, place = out, place + 1
    if groups > 1:
        _make_dense(weights, "classifier.conv.1", groups, shuffled_by=groups)
    renamed = {ours: weights[theirs] for theirs, ours in _MF_STEM.items()}
    for name, tensor in weights.items():
        module, _, kind = name.rpartition(".")
        if module in modules:
            renamed[f"{modules[module]}.{kind}"] = tensor
    return renamed


def _name_modules(kind: str) -> Iterator[tuple[str, str]]:
    """Yields pairs of names, the authors' and timm's, for the modules in a kind of block."""
    for theirs, ours in _MF_BLOCKS[kind].items():
        if theirs.startswith("hyper"):
            yield f"{theirs}.hyper.0", f"{ours}.squeeze"
            yield f"{theirs}.hyper.2", f"{ours}.slopes"
        else:
            stem, _, number = theirs.rpartition(".")
            yield theirs, ours
            yield f"{stem}.{int(number) + 1}", f"{ours}.norm"
    yield from _MF_ATTENTION.items() if kind != "lite" else ()


def _count_groups(state: Mapping[str, Tensor]) -> int:
    hidden, reduce = state["features.0.conv.0.weight"], state["features.0.conv.4.weight"]
    return len(hidden) // reduce.shape[1]


def _undo_groups(
    weights: dict[str, Tensor], own: str, kind: str, channels: int, groups: int
) -> None:
    """Makes the 1x1 convolutions of a block dense, and reorders channels instead of shuffling."""
    if kind == "lite":
        _make_dense(weights, f"{own}conv.4", groups, shuffled_by=channels)
    elif kind == "down":
        for first, act, second in (("conv1", "hyper1", "conv2"), ("conv3", "hyper3", "conv4")):
            inputs = channels if first == "conv1" else len(weights[f"{own}conv2.0.weight"])
            _make_dense(weights, f"{own}{second}.0", groups, shuffled_by=inputs)
            for part in ("weight", "bias"):  # both slopes of each channel
                slopes = weights[f"{own}{act}.hyper.2.{part}"].unflatten(0, (2, -1))
                order = _shuffle(slopes.shape[1], inputs)
                weights[f"{own}{act}.hyper.2.{part}"] = slopes[:, order.argsort()].flatten(0, 1)
    else:
        for name in ("conv1", "conv3"):
            _make_dense(weights, f"{own}{name}.0", groups)
            order = _shuffle(len(weights[f"{own}{name}.0.weight"]), groups)
            for key in [k for k in weights if k.startswith(f"{own}{name}.") and weights[k].dim()]:
                weights[key] = weights[key][order]


def _make_dense(weights: dict[str, Tensor], name: str, groups: int, shuffled_by: int = 1) -> None:
    """Makes a grouped 1x1 convolution dense; its input is the channels before the shuffle."""
    blocks = weights[f"{name}.weight"][:, :, 0, 0].chunk(groups)
    dense = torch.block_diag(*blocks)
    order = _shuffle(dense.shape[1], shuffled_by)
    weights[f"{name}.weight"] = dense[:, order.argsort(), None, None].contiguous()


def _shuffle(channels: int, groups: int) -> Tensor:
    """Returns (channels,): for each output position, the channel that a shuffle moves there."""
    return torch.arange(channels).view(groups, -1).t().flatten()


def names_for_timm(
    state: Mapping[str, Tensor], model: nn.Module | None = None
) -> dict[str, Tensor]:
    """Renames the tensors of a model with a Mobile-Former backbone to timm's names.

    Returns the backbone. For classifiers with a linear decoder, also returns the last layer, into
    which a preceding BatchNorm is folded. ``model`` is unused; timm's loaders pass it.
    """
    names = bare_backbone(state)
    if not names:
        return dict(state)
    return {**{short: state[name] for name, short in names.items()}, **_fold_classifier(state)}


def _fold_classifier(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    decoder = {n.partition(_DECODER)[2]: tensor for n, tensor in state.items() if _DECODER in n}
    if any(name.startswith("neck.") for name in decoder):  # a network from "508M" to "26M"
        return decoder
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
    """Loads a file of this package into timm's Mobile-Former, whose input is RGB in [0, 1].

    The classifier is loaded if its shape fits. Mean and std in ``settings`` (timm's
    ``pretrained_cfg``) are set to those in the file. Raises a ``UserError`` if the backbone does
    not fit.
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
    model.load_state_dict({**own, **fitting})
    logger.info("Loaded '%s': %s", path, report)
    if info is not None and info.pixel_mean and info.pixel_std and settings is not None:
        order = slice(None, None, -1 if is_bgr else 1)
        settings["mean"] = tuple(value / 255 for value in info.pixel_mean[order])
        settings["std"] = tuple(value / 255 for value in info.pixel_std[order])
