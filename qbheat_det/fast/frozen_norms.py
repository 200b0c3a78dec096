# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Convolutions of a timm backbone that also compute the frozen BatchNorm behind them.

A frozen BatchNorm multiplies each channel by a constant and adds another. In training, the scale is
multiplied into the weight of the convolution in each step, and the offset is its bias. This saves
reading and writing the feature map once in each direction.
"""

from typing import cast

import torch
from timm.layers import pad_same
from torch import Tensor, nn
from torch.nn import functional as F

from qbheat_det.modeling.backbone.timm_backbone import (
    FrozenNorm,
    TimmBackbone,
    TraceableConv2dSame,
)

from .depthwise import Pair, Settings, convolve_depthwise, is_slow_depthwise, pads_with_zeros
from .form import FastForm


class FoldedNorm(FastForm, FrozenNorm):
    """The activation of a frozen BatchNorm that is computed in the convolution before it."""

    def forward(self, x: Tensor) -> Tensor:
        """Takes and returns (N, C, H, W)."""
        return cast(Tensor, self.act(self.drop(x)))


class NormedConv2d(FastForm, nn.Conv2d):
    """A convolution, with zeros or timm's "same" padding, and the frozen BatchNorm behind it.

    The BatchNorm stays in its place in the model, which has its buffers.
    """

    _norm: tuple[FrozenNorm]  # in a tuple, so that it is not registered as a child
    _pads_like_timm: bool

    @classmethod
    def before(cls, norm: FrozenNorm, conv: nn.Conv2d) -> "NormedConv2d":
        """Returns the fast form of ``conv``, which is followed by ``norm``."""
        layer = cast(NormedConv2d, cls.of(conv))
        layer._norm = (norm,)
        layer._pads_like_timm = isinstance(conv, TraceableConv2dSame)
        return layer

    def forward(self, x: Tensor) -> Tensor:
        """Takes a feature map (N, C, H, W) and returns a feature map (N, C', H', W')."""
        (norm,) = self._norm
        # PyTorch's fuse_conv_bn_weights returns new parameters, which would get the gradients.
        scale = norm.weight * torch.rsqrt(norm.running_var + norm.eps)
        offset = norm.bias - norm.running_mean * scale
        weight = self.weight * scale[:, None, None, None]
        bias = offset
        if self.bias is not None:
            bias = offset + self.bias * scale
        padding = cast(Pair, self.padding)
        if self._pads_like_timm:
            x = pad_same(x, self.kernel_size, self.stride, self.dilation)
            padding = (0, 0)
        settings = Settings.of(self, padding)
        if is_slow_depthwise(self):
            return convolve_depthwise(x, weight, bias, settings)
        return F.conv2d(x, weight, bias, *settings)


def fold_frozen_norms(model: nn.Module) -> None:
    """Replaces, in place, the frozen BatchNorms of timm backbones and the convolutions before them.

    Names, parameters and buffers do not change. Results are equal up to rounding.
    """
    for backbone in list(model.modules()):
        if not isinstance(backbone, TimmBackbone):
            continue
        net = backbone.net
        for norm_name, conv_name in backbone.norm_inputs.items():
            norm = net.get_submodule(norm_name)
            conv = net.get_submodule(conv_name)
            if type(norm) is not FrozenNorm or type(conv) not in (nn.Conv2d, TraceableConv2dSame):
                continue
            conv = cast(nn.Conv2d, conv)
            if not pads_with_zeros(conv):
                continue
            folded = cast(FrozenNorm, FoldedNorm.of(norm))
            net.set_submodule(norm_name, folded)
            net.set_submodule(conv_name, NormedConv2d.before(folded, conv))
