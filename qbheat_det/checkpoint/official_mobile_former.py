# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The tensors of Mobile-Former's authors (github.com/AAboys/MobileFormer) under timm's names here.

Their networks are "508M" to "26M" of ``MOBILE_FORMER_ARCHS``. The smallest has grouped 1x1
convolutions and channel shuffles; they become dense weights in an order of the channels that needs
no shuffle, which gives the same outputs.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

# Names of the authors of Mobile-Former, of modules, and ours; those of blocks by kind of block.
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
    "lite": {
        "conv.0": "depthwise",
        "conv.1": "depthwise.norm",
        "conv.5": "pointwise.norm",
        "conv.4": "pointwise",
    },
    "down": {
        "conv1.0": "mobile.down",
        "conv1.1": "mobile.down.norm",
        "hyper1.hyper.0": "mobile.down_act.squeeze",
        "hyper1.hyper.2": "mobile.down_act.slopes",
        "conv2.0": "mobile.down_reduce",
        "conv2.1": "mobile.down_reduce.norm",
        "conv3.0": "mobile.depthwise",
        "conv3.1": "mobile.depthwise.norm",
        "hyper3.hyper.0": "mobile.depthwise_act.squeeze",
        "hyper3.hyper.2": "mobile.depthwise_act.slopes",
        "conv4.1": "mobile.reduce.norm",
        "conv4.0": "mobile.reduce",
    },
    "plain": {
        "conv1.0": "mobile.expand",
        "conv1.1": "mobile.expand.norm",
        "hyper1.hyper.0": "mobile.expand_act.squeeze",
        "hyper1.hyper.2": "mobile.expand_act.slopes",
        "conv2.0": "mobile.depthwise",
        "conv2.1": "mobile.depthwise.norm",
        "hyper2.hyper.0": "mobile.depthwise_act.squeeze",
        "hyper2.hyper.2": "mobile.depthwise_act.slopes",
        "conv3.1": "mobile.reduce.norm",
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
    """Returns the key of ``MOBILE_FORMER_ARCHS`` for weights of the authors' networks."""
    tokens, expanded = len(state["tokens.weight"]), len(state["classifier.conv.1.weight"])
    sizes = {1440: "508M", 1152: "294M", 960: "214M", 768: "151M" if tokens == 6 else "96M"}
    return sizes.get(expanded, "52M" if _count_groups(state) == 1 else "26M")


def convert_official(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the weights under the names of timm's ``mobile_former_508m`` and the like.

    Raises a ``KeyError`` if a tensor that tells the blocks apart is missing.
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
        convolutions = [
            name for name in _MF_BLOCKS[kind] if state[f"{own}{name}.weight"].dim() == 4
        ]
        out = len(state[f"{own}{convolutions[-1]}.weight"])
        if kind == "down" or (kind == "lite" and out != channels):
            stage, place = stage + 1, 0
        if groups > 1:
            _undo_groups(weights, own, kind, channels, groups)
        names = _MF_BLOCKS[kind] if kind == "lite" else _MF_BLOCKS[kind] | _MF_ATTENTION
        modules |= {f"{own}{k}": f"stages.{stage}.{place}.{v}" for k, v in names.items()}
        channels, place = out, place + 1
    if groups > 1:
        _make_dense(weights, "classifier.conv.1", groups, shuffled_by=groups)
    renamed = {ours: weights[theirs] for theirs, ours in _MF_STEM.items()}
    for name, tensor in weights.items():
        module, _, kind = name.rpartition(".")
        if module in modules:
            renamed[f"{modules[module]}.{kind}"] = tensor
    return renamed


def _count_groups(state: Mapping[str, Tensor]) -> int:
    hidden, reduce = state["features.0.conv.0.weight"], state["features.0.conv.4.weight"]
    return len(hidden) // reduce.shape[1]


def _undo_groups(
    weights: dict[str, Tensor], own: str, kind: str, channels: int, groups: int
) -> None:
    """Makes the 1x1 convolutions of a block dense, in an order that needs no shuffles."""
    if kind == "lite":
        _make_dense(weights, f"{own}conv.4", groups, shuffled_by=channels)
    elif kind == "down":
        for first, act, second in (("conv1", "hyper1", "conv2"), ("conv3", "hyper3", "conv4")):
            inputs = channels if first == "conv1" else len(weights[f"{own}conv2.0.weight"])
            _make_dense(weights, f"{own}{second}.0", groups, shuffled_by=inputs)
            for part in ("weight", "bias"):  # the slopes of both lines, by channel
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
    """Makes a grouped 1x1 convolution dense, for the channels as they are before a shuffle."""
    blocks = weights[f"{name}.weight"][:, :, 0, 0].chunk(groups)
    dense = torch.block_diag(*blocks)
    order = _shuffle(dense.shape[1], shuffled_by)
    weights[f"{name}.weight"] = dense[:, order.argsort(), None, None].contiguous()


def _shuffle(channels: int, groups: int) -> Tensor:
    """Returns (channels,): the channel that a shuffle moves to each place."""
    return torch.arange(channels).view(groups, -1).t().flatten()
