# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Folds BatchNorm into convolutions, for inference."""

from collections import Counter
from typing import Any

from detectron2.layers import Conv2d, FrozenBatchNorm2d, NaiveSyncBatchNorm
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

# Only these exact types: subclasses, such as timm's BatchNormAct2d, may do more than normalize.
_NORMS = (nn.BatchNorm2d, nn.SyncBatchNorm, NaiveSyncBatchNorm, FrozenBatchNorm2d)


def fold_batch_norms(model: nn.Module) -> tuple[int, int]:
    """Folds, in place, each BatchNorm that directly follows a convolution.

    The BatchNorm is the ``norm`` of a Detectron2 convolution, or the module after a convolution in
    an ``nn.Sequential`` if both modules are used only once in the model. Returns the number of
    norms that are folded, and the number of those that are not.
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
                convolution = module[index]
                norm = module[index + 1]
                unshared = uses[id(convolution)] == uses[id(norm)] == 1
                # The norm or activation of a Detectron2 convolution would come before ``norm``.
                is_bare = not isinstance(convolution, Conv2d) or (
                    convolution.norm is convolution.activation is None
                )
                if unshared and is_bare and _can_fold(convolution, norm):
                    _fold(convolution, norm)
                    module[index + 1] = nn.Identity()
                    folded += 1
    return folded, sum(type(module) in _NORMS for module in model.modules())


def _can_fold(convolution: nn.Module, norm: object) -> bool:
    return (
        type(convolution) in (nn.Conv2d, Conv2d)
        and type(norm) in _NORMS
        and getattr(norm, "running_var", None) is not None
    )


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
