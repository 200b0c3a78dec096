# Copyright (c) qbheat_det contributors. Apache-2.0.
"""BatchNorm that is a fixed scale and shift becomes part of the convolution before it."""

from collections import Counter
from typing import Any

import torch
from detectron2.layers import Conv2d, FrozenBatchNorm2d, NaiveSyncBatchNorm
from torch import Tensor, nn

from qbheat_det.layers import DepthwiseConv2d, NormedConv2d

# Exact types: subclasses may do more than normalise, as timm's BatchNormAct2d does.
_NORMS = (nn.BatchNorm2d, nn.SyncBatchNorm, NaiveSyncBatchNorm, FrozenBatchNorm2d)


def fold_batch_norms(model: nn.Module) -> tuple[int, int]:
    """Folds every BatchNorm that directly follows a convolution of its own, in place.

    That is the ``norm`` of a Detectron2 convolution, and a pair of neighbours in a ``Sequential``.

    Args:
        model: in evaluation mode.

    Returns:
        How many were folded, and how many are left.
    """
    uses = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    folded = 0
    for module in list(model.modules()):
        if isinstance(module, Conv2d) and _can_fold(module, module.norm):
            _fold(module, module.norm)
            module.norm = None
            folded += 1
        elif type(module) is nn.Sequential:
            for index in range(len(module) - 1):
                convolution, norm = module[index], module[index + 1]
                alone = uses[id(convolution)] == uses[id(norm)] == 1
                plain = getattr(convolution, "norm", None) is None
                if alone and plain and _can_fold(convolution, norm) and not _acts(convolution):
                    _fold(convolution, norm)
                    module[index + 1] = nn.Identity()
                    folded += 1
    return folded, sum(type(module) in _NORMS for module in model.modules())


def _can_fold(convolution: nn.Module, norm: object) -> bool:
    return (
        type(convolution) in (nn.Conv2d, Conv2d, NormedConv2d, DepthwiseConv2d)
        and type(norm) in _NORMS
        and getattr(norm, "running_var", None) is not None
    )


def _acts(convolution: nn.Module) -> bool:
    return getattr(convolution, "activation", None) is not None


@torch.no_grad()
def _fold(convolution: Any, norm: Any) -> None:
    scale = (norm.running_var.double() + norm.eps).rsqrt()
    if norm.weight is not None:
        scale = scale * norm.weight.double()
    shift = -norm.running_mean.double() * scale
    if norm.bias is not None:
        shift = shift + norm.bias.double()
    if convolution.bias is not None:
        shift = shift + convolution.bias.double() * scale
    weight = convolution.weight
    convolution.weight = _constant(weight.double() * scale[:, None, None, None], weight)
    convolution.bias = _constant(shift, weight)


def _constant(value: Tensor, like: Tensor) -> nn.Parameter:
    return nn.Parameter(value.to(like.dtype), requires_grad=False)
