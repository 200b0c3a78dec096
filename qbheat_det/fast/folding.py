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
    an ``nn.Sequential``. In an ``nn.Sequential``, both modules must be used only once in the model.
    Returns the number of BatchNorms that were folded, and the number of those that were not.
    """
    uses = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    num_folded = 0
    for module in list(model.modules()):
        if isinstance(module, Conv2d) and _can_fold(module, module.norm):
            _fold(module, module.norm)
            module.norm = None
            num_folded += 1
        elif type(module) is nn.Sequential:
            for index in range(len(module) - 1):
                convolution = module[index]
                norm = module[index + 1]
                is_shared = uses[id(convolution)] > 1 or uses[id(norm)] > 1
                # A Detectron2 convolution may apply its own norm or activation before ``norm``.
                is_plain = not isinstance(convolution, Conv2d) or (
                    convolution.norm is None and convolution.activation is None
                )
                if is_plain and not is_shared and _can_fold(convolution, norm):
                    _fold(convolution, norm)
                    module[index + 1] = nn.Identity()
                    num_folded += 1
    num_left = sum(type(module) in _NORMS for module in model.modules())
    return num_folded, num_left


def _can_fold(convolution: nn.Module, norm: object) -> bool:
    is_convolution = type(convolution) in (nn.Conv2d, Conv2d)
    is_batch_norm = type(norm) in _NORMS
    has_statistics = getattr(norm, "running_var", None) is not None
    return is_convolution and is_batch_norm and has_statistics


def _fold(convolution: Any, norm: Any) -> None:
    """Multiplies the scale of ``norm`` into the convolution's weight, and adds its offset."""
    convolution.weight, convolution.bias = fuse_conv_bn_weights(
        convolution.weight,
        convolution.bias,
        norm.running_mean,
        norm.running_var,
        norm.eps,
        norm.weight,
        norm.bias,
    )
