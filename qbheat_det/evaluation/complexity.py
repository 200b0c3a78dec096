# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Counts multiply-adds and parameters of an instantiated model.

fvcore traces one forward pass and counts its operators. This module adds operators that fvcore does
not support, and defines the two counting rules that reproduce the numbers in the Mobile-Former
papers.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from math import prod
from typing import Any

import torch
from detectron2.structures import Boxes, Instances
from fvcore.nn import FlopCountAnalysis
from fvcore.nn.jit_handles import elementwise_flop_counter, get_shape
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from qbheat_det.core.environment import quiet
from qbheat_det.core.seeding import undisturbed


class CountingRule(Enum):
    """Which operators are counted. The values describe the rules."""

    CORE = (
        "multiply-adds of convolutions, linear layers and the two products of attention; "
        "biases, softmax and elementwise operators are free"
    )
    EXT = (
        "core, plus per element 2 for BatchNorm, 5 for LayerNorm and GroupNorm, 4 for the output "
        "of bilinear resizing, 1 for the input of global average pooling (fvcore's defaults)"
    )


# Counted operators that are not multiply-adds. All other counted operators belong to CORE.
_NOT_CORE = {
    "batch_norm",
    "layer_norm",
    "group_norm",
    "instance_norm",
    "upsample_nearest2d",
    "upsample_bilinear2d",
    "adaptive_avg_pool1d",
    "adaptive_avg_pool2d",
    "grid_sampler",
}


@dataclass(frozen=True)
class MAdds:
    """Counts of one forward pass, by module name ("" for the whole model) and operator."""

    by_module: Mapping[str, Mapping[str, int]]

    def total(self, rule: CountingRule, module: str = "") -> int:
        """Returns the multiply-adds of ``module``, including submodules, by ``rule``."""
        return sum(
            count
            for operator, count in self.by_module[module].items()
            if rule is CountingRule.EXT or operator not in _NOT_CORE
        )


def count_madds(model: nn.Module, *inputs: Any) -> MAdds:
    """Counts ``model(*inputs)`` in evaluation mode. Inputs are (containers of) tensors."""
    analysis = FlopCountAnalysis(model, inputs)
    analysis.unsupported_ops_warnings(False).uncalled_modules_warnings(False)
    analysis.tracer_warnings("none")
    analysis.set_op_handle(**_ADDED_HANDLES)
    with undisturbed(model), quiet("fvcore.nn.jit_analysis"):  # fvcore warns of uncounted operators
        counts = analysis.by_module_and_operator()
    rounded = {name: {key: round(n) for key, n in own.items()} for name, own in counts.items()}
    return MAdds(rounded)


def count_detector_madds(model: nn.Module, height: int, width: int) -> MAdds:
    """Counts the inference of a Detectron2 model on an (H, W) image on the CPU, with padding."""
    image = torch.zeros(3, height, width)
    counts = count_madds(_TensorsInTensorsOut(model), image).by_module
    names = [name for name, _ in model.named_modules()]  # parents before children
    return MAdds({name: counts[f"model.{name}".rstrip(".")] for name in names})


def count_parameters(model: nn.Module, *, batch_norm_affine: bool = True) -> int:
    """Returns the number of parameters. Shared parameters are counted once.

    Without ``batch_norm_affine``, BatchNorm's scale and offset are not counted. This is the rule of
    the paper's detection tables, because scale and offset are buffers in frozen backbones.
    """
    skipped = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, _BatchNorm) and not batch_norm_affine
        for parameter in module.parameters(recurse=False)
    }
    return sum(p.numel() for p in model.parameters() if id(p) not in skipped)


class _TensorsInTensorsOut(nn.Module):
    """Wraps a Detectron2 model for the tracer, which needs tensors as inputs and outputs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: Tensor) -> list[Tensor]:
        height, width = (int(length) for length in image.shape[-2:])
        outputs = self.model([{"image": image, "height": height, "width": width}])
        return list(_tensors(outputs))


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Instances):
        yield from _tensors(output.get_fields())
    elif isinstance(output, Boxes):
        yield output.tensor
    elif isinstance(output, Mapping | list | tuple):
        for value in output.values() if isinstance(output, Mapping) else output:
            yield from _tensors(value)


def _attention(inputs: list[Any], outputs: list[Any]) -> int:
    # Counts QK^T and the product with V: queries (..., L, D), keys (..., S, D), values (..., S, V).
    query, key, value = (get_shape(entry) for entry in inputs[:3])
    return int(prod(query[:-1]) * key[-2] * (query[-1] + value[-1]))


def _baddbmm(inputs: list[Any], outputs: list[Any]) -> int:
    left, right = get_shape(inputs[1]), get_shape(inputs[2])
    return int(prod(left) * right[-1])


_ADDED_HANDLES: dict[str, Callable[[list[Any], list[Any]], int]] = {
    "aten::scaled_dot_product_attention": _attention,
    **{
        f"aten::_scaled_dot_product_{kind}": _attention
        for kind in (
            *("attention_math", "flash_attention", "flash_attention_for_cpu"),
            *("efficient_attention", "cudnn_attention"),
        )
    },
    "aten::baddbmm": _baddbmm,
    "aten::adaptive_avg_pool1d": elementwise_flop_counter(1, 0),
}
