# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Counts multiply-adds and parameters of an instantiated model.

PyTorch's ``FlopCounterMode`` counts the products in one forward pass. This module adds norms,
resizing and pooling, and defines the two counting rules that reproduce the numbers in the
Mobile-Former papers.
"""

import copy
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from math import prod
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.flop_counter import FlopCounterMode


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


def _per_input(factor: int) -> Callable[..., int]:
    """Returns a function that counts ``factor`` multiply-adds per element of the first argument."""
    return lambda shape, *_, **__: 2 * factor * prod(shape)


_aten = torch.ops.aten
# Operators that only ``CountingRule.EXT`` counts. The functions take the shapes of the arguments,
# and return twice the count, because PyTorch counts a multiply-add as two operations.
_NOT_CORE: dict[Any, Callable[..., int]] = {
    _aten.native_batch_norm: _per_input(2),
    _aten._native_batch_norm_legit_no_training: _per_input(2),
    _aten.native_layer_norm: _per_input(5),
    _aten.native_group_norm: _per_input(5),
    _aten.upsample_bilinear2d: lambda *_, out_shape, **__: 2 * 4 * prod(out_shape),
    _aten.mean: _per_input(1),
}


@dataclass(frozen=True)
class MAdds:
    """Multiply-adds of one forward pass, by module name ("" for the model) and by operator."""

    by_module: Mapping[str, Mapping[Any, int]]

    def total(self, rule: CountingRule, module: str = "") -> int:
        """Returns the multiply-adds of ``module``, including submodules, by ``rule``."""
        total = 0
        for operator, count in self.by_module[module].items():
            if rule is CountingRule.EXT or operator not in _NOT_CORE:
                total += count
        return total


def count_madds(model: nn.Module, *inputs: Any) -> MAdds:
    """Counts the multiply-adds of ``model(*inputs)`` in evaluation mode, on the CPU."""
    model = copy.deepcopy(model).eval().requires_grad_(False)
    # Frozen norms are folded into convolutions, unless they have a hook. They must be counted.
    for module in model.modules():
        module.register_forward_hook(lambda *_: None)
    with torch.no_grad(), FlopCounterMode(display=False, custom_mapping=_NOT_CORE) as mode:
        model(*inputs)
    flops = mode.get_flop_counts()
    counts: dict[str, Counter[Any]] = {}  # by module name, then by operator
    for name, module in reversed([*model.named_modules()]):  # children before parents
        # PyTorch's names begin with the class of the model. "Global" is the model itself.
        flops_name = f"{type(model).__name__}.{name}" if name else "Global"
        if flops_name in flops:
            operators = flops[flops_name].items()
            counts[name] = Counter({operator: number // 2 for operator, number in operators})
            continue
        # The module was not called, as a ``ModuleList``, so its children are added up.
        counts[name] = Counter()
        for child, _ in module.named_children():
            counts[name].update(counts[f"{name}.{child}"])
    return MAdds(dict(reversed(counts.items())))


def count_detector_madds(model: nn.Module, height: int, width: int) -> MAdds:
    """Counts the multiply-adds of a detector on an (H, W) image, including padding, on the CPU."""
    entry = {"image": torch.zeros(3, height, width), "height": height, "width": width}
    return count_madds(model, [entry])


def count_parameters(model: nn.Module, *, batch_norm_affine: bool = True) -> int:
    """Returns the number of parameters. Shared parameters are counted once.

    Without ``batch_norm_affine``, BatchNorm's scale and offset are not counted. This is the rule of
    the paper's detection tables, because scale and offset are buffers in frozen backbones.
    """
    skipped: set[nn.Parameter] = set()
    if not batch_norm_affine:
        for module in model.modules():
            if isinstance(module, _BatchNorm):
                skipped.update(module.parameters(recurse=False))
    return sum(parameter.numel() for parameter in model.parameters() if parameter not in skipped)
