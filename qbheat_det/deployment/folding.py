# Copyright (c) qbheat_det contributors. Apache-2.0.
"""BatchNorm folded into the weights of the convolution before it."""

from collections import Counter
from typing import Any

from detectron2.layers import Conv2d, FrozenBatchNorm2d, NaiveSyncBatchNorm
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

from qbheat_det.layers import DepthwiseConv2d, NormedConv2d

# Exact types: subclasses may do more than normalise, as timm's BatchNormAct2d does.
_NORMS = (nn.BatchNorm2d, nn.SyncBatchNorm, NaiveSyncBatchNorm, FrozenBatchNorm2d)


def fold_batch_norms(model: nn.Module) -> tuple[int, int]:
    """Folds, in place, every BatchNorm that directly follows a convolution used nowhere else.

    Found are the ``norm`` of Detectron2's convolutions, and neighbours in an ``nn.Sequential``.

    Args:
        model: in evaluation mode.

    Returns:
        The number of folded norms, and of those that are left.
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
                unshared = uses[id(convolution)] == uses[id(norm)] == 1
                if unshared and _is_bare(convolution) and _can_fold(convolution, norm):
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


def _is_bare(convolution: nn.Module) -> bool:
    """Whether nothing of a Detectron2 convolution's own comes between it and the next module."""
    if not isinstance(convolution, Conv2d):
        return True
    return convolution.norm is None and convolution.activation is None


def _fold(convolution: Any, norm: Any) -> None:
    convolution.weight, convolution.bias = fuse_conv_bn_weights(
        convolution.weight,
        convolution.bias,
        norm.running_mean,
        norm.running_var,
        norm.eps,
        norm.weight,
        norm.bias,
    )
