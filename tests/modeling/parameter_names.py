# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Gives the package's modules random weights, and hands these to the references by name."""

import re
from collections.abc import Sequence

import torch
from torch import Tensor, nn

# Beginnings of the names in one module of the package, and what the reference calls them.
# A norm sits inside its convolution (Detectron2's Conv2d), so it stands before it.
Names = Sequence[tuple[str, str]]

DYNAMIC_RELU: Names = [("squeeze.", "reduce."), ("slopes.", "expand.")]
TO_FORMER: Names = [("query.", "query."), ("gate.", "gate."), ("project.", "out."), ("norm.",) * 2]
FORMER: Names = [
    ("query.", "query."),
    ("project.", "out."),
    ("attention_norm.", "norm1."),
    ("mlp.0.", "fc1."),
    ("mlp.2.", "fc2."),
    ("mlp_norm.", "norm2."),
]
TO_MOBILE: Names = [("key.", "key."), ("value.", "value.")]
LITE: Names = [
    ("depthwise.norm.", "bn1."),
    ("depthwise.", "dw."),
    ("pointwise.norm.", "bn2."),
    ("pointwise.", "pw."),
]
MOBILE: Names = [
    ("expand.norm.", "bn1."),
    ("expand.", "pw1."),
    ("expand_act.squeeze.", "act1.reduce."),
    ("expand_act.slopes.", "act1.expand."),
    ("depthwise.norm.", "bn2."),
    ("depthwise.", "dw."),
    ("depthwise_act.squeeze.", "act2.reduce."),
    ("depthwise_act.slopes.", "act2.expand."),
    ("reduce.norm.", "bn3."),
    ("reduce.", "pw2."),
]
DOWN_MOBILE: Names = [
    ("down.norm.", "bn1."),
    ("down.", "dw1."),
    ("down_act.squeeze.", "act1.reduce."),
    ("down_act.slopes.", "act1.expand."),
    ("down_reduce.norm.", "bn2."),
    ("down_reduce.", "pw1."),
    ("depthwise.norm.", "bn3."),
    ("depthwise.", "dw2."),
    ("depthwise_act.squeeze.", "act2.reduce."),
    ("depthwise_act.slopes.", "act2.expand."),
    ("reduce.norm.", "bn4."),
    ("reduce.", "pw2."),
]


def under(module: str, reference: str, names: Names) -> list[tuple[str, str]]:
    """The same table one name further down."""
    return [(f"{module}.{ours}", f"{reference}.{theirs}") for ours, theirs in names]


def encoder_names(kinds: Sequence[str]) -> Names:
    """Names in ``MobileFormer``, for the kinds ("lite", "plain", "down") of its blocks."""
    names = [
        ("tokens", "tokens"),
        ("stem.norm.", "stem.bn."),
        ("stem.", "stem.conv."),
        ("expand.norm.", "expand.bn."),
        ("expand.", "expand.conv."),
    ]
    stage, place = 0, -1
    for number, kind in enumerate(kinds, start=1):
        stage, place = (stage + 1, 0) if kind == "down" else (stage, place + 1)
        ours, theirs = f"stages.{stage}.{place}", f"block.{number}"
        if kind == "lite":
            names += under(ours, f"{theirs}.mobile", LITE)
            continue
        names += under(f"{ours}.mobile_to_former", f"{theirs}.to_former", TO_FORMER)
        names += under(f"{ours}.former", f"{theirs}.former", FORMER)
        mobile = DOWN_MOBILE if kind == "down" else MOBILE
        names += under(f"{ours}.mobile", f"{theirs}.mobile", mobile)
        names += under(f"{ours}.former_to_mobile", f"{theirs}.to_mobile", TO_MOBILE)
    return names


ATTENTION: Names = [("in_proj_", "in_proj_"), ("out_proj.", "out.")]
FEED_FORWARD: Names = [("0.", "fc1."), ("3.", "fc2.")]
SEPARABLE: Names = [
    ("depthwise.norm.", "bn1."),
    ("depthwise.", "dw."),
    ("pointwise.norm.", "bn2."),
    ("pointwise.", "pw."),
]
QUERY_LAYER: Names = [
    ("adapt_position.0.", "position.fc1."),
    ("adapt_position.2.", "position.fc2."),
    *under("cross_attention", "cross", ATTENTION),
    ("cross_norm.", "cross_norm."),
    *under("self_attention", "self", ATTENTION),
    ("self_norm.", "self_norm."),
    *under("feed_forward", "ffn", FEED_FORWARD),
    ("feed_forward_norm.", "ffn_norm."),
]
TRANSFORMER_MOBILE: Names = [
    *under("attention", "self", ATTENTION),
    ("attention_norm.", "self_norm."),
    *under("feed_forward", "ffn", FEED_FORWARD),
    ("feed_forward_norm.", "ffn_norm."),
]
LITE_MOBILE: Names = [
    ("depthwise.", "dw."),
    *under("act", "act", DYNAMIC_RELU),
    ("pointwise.", "pw."),
]


def decoder_names(blocks: Sequence[int]) -> Names:
    """Names in ``MFDecoder``, for its numbers of blocks at strides 32, 16 and 8."""
    names = [
        ("query_position.weight", "queries"),
        *under("down", "down", SEPARABLE),
        ("class_embed.", "class."),
        ("bbox_embed.hidden.0.", "box.1."),
        ("bbox_embed.hidden.1.", "box.2."),
        ("bbox_embed.last.", "box.3."),
    ]
    for step in (0, 1):
        names += under(f"up.{step}", f"up.{step + 1}", SEPARABLE)
        names += [(f"laterals.{step}.conv.", f"up.{step + 1}.lateral.")]
        names += [(f"laterals.{step}.norm.", f"up.{step + 1}.lateral_norm.")]
    for level, count in enumerate(blocks):
        mobile = LITE_MOBILE if level else TRANSFORMER_MOBILE
        for number in range(count):
            ours, theirs = f"levels.{level}.{number}", f"level.{level}.{number}"
            names += under(f"{ours}.query_layer", theirs, QUERY_LAYER)
            names += under(f"{ours}.mobile", f"{theirs}.mobile", mobile)
            names += under(f"{ours}.query_to_map", f"{theirs}.to_map", TO_MOBILE)
    return names


def randomise_(module: nn.Module, *, gain: float = 1.2, seed: int = 0) -> None:
    """Fills every parameter and statistic, so that nothing hides behind a zero or a one.

    Norm scales and variances lie in [0.5, 1.5]; other vectors, among them the means, have standard
    deviation 0.2; matrices and kernels multiply sizes by ``gain``; learned tokens and query
    positions are standard normal.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in module.state_dict().items():
        if not tensor.is_floating_point():
            continue
        if name.endswith(("tokens", "query_position.weight")):
            value = torch.randn(tensor.shape, generator=generator)
        elif tensor.ndim >= 2:
            noise = torch.randn(tensor.shape, generator=generator)
            value = noise * gain * (tensor.shape[0] / tensor.numel()) ** 0.5
        elif name.endswith(("weight", "running_var")):
            value = 0.5 + torch.rand(tensor.shape, generator=generator)
        else:
            value = 0.2 * torch.randn(tensor.shape, generator=generator)
        tensor.copy_(value)


def renamed(module: nn.Module, names: Names) -> dict[str, Tensor]:
    """Returns every parameter and statistic of a module under its name in the reference.

    Raises:
        AssertionError: a name has no translation, or two names have the same.
    """
    translated: dict[str, Tensor] = {}
    for name, tensor in module.state_dict().items():
        if name.endswith("num_batches_tracked"):
            continue
        fitting = [pair for pair in names if name.startswith(pair[0])]
        assert fitting, f"{name} is unknown to the reference"
        ours, theirs = fitting[0]
        own_name = theirs + name.removeprefix(ours)
        for part, piece in _split_projections(own_name, tensor):
            assert part not in translated, f"two parameters are called {part}"
            translated[part] = piece
    return translated


def _split_projections(name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """Takes PyTorch's one matrix for query, key and value apart."""
    fused = re.fullmatch(r"(.*)in_proj_(weight|bias)", name)
    if not fused:
        return [(name, tensor)]
    prefix, kind = fused.groups()
    parts = tensor.chunk(3)
    return [
        (f"{prefix}{role}.{kind}", part)
        for role, part in zip(("query", "key", "value"), parts, strict=True)
    ]
