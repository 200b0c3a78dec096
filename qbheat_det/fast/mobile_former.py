# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Blocks of Mobile-Former and MF-DETR for one image, with fewer passes over wide feature maps.

A dynamic ReLU, max(low x, high x), is a PReLU times the larger slope. The PReLU is one pass over
the feature map. The larger slope, one number per channel, is multiplied into the weights of the
next convolution.

A block does so for one unpadded image without gradients. Otherwise it computes as the plain block.
It is not used in exported files, where it saves only 3 to 4 %.
"""

import torch
from detectron2.layers import Conv2d
from torch import Tensor
from torch.nn import functional as F

from qbheat_det.layers import DownMobile, DynamicReLU, Mobile
from qbheat_det.modeling.detr.decoder_block import LevelMap, LiteMobile

from .dynamic_relu import sort_slopes
from .form import FastForm

_MIN_SLOPE = 1e-12  # lower bound of the larger slope, which is a divisor


class FusedMobile(FastForm, Mobile):
    """``Mobile`` for inference."""

    def forward(self, x: Tensor, token: Tensor, padding: Tensor | None = None) -> Tensor:
        """See ``Mobile.forward``."""
        if padding is not None or not _is_one_image(x, self.expand):
            return super().forward(x, token, padding)
        hidden, factor = scaled_prelu(self.expand_act, self.expand(x), token)
        hidden = convolve(self.depthwise, hidden, factor)
        hidden, factor = scaled_prelu(self.depthwise_act, hidden, token)
        out = convolve(self.reduce, hidden, factor)
        return out.add_(x) if self.has_identity else out


class FusedDownMobile(FastForm, DownMobile):
    """``DownMobile`` for inference."""

    def forward(self, x: Tensor, token: Tensor, padding: Tensor | None = None) -> Tensor:
        """See ``DownMobile.forward``."""
        if padding is not None or not _is_one_image(x, self.down):
            return super().forward(x, token, padding)
        hidden, factor = scaled_prelu(self.down_act, self.down(x), token)
        y = convolve(self.down_reduce, hidden, factor)
        hidden, factor = scaled_prelu(self.depthwise_act, self.depthwise(y), token)
        return convolve(self.reduce, hidden, factor).add_(y)


class FusedLiteMobile(FastForm, LiteMobile):
    """``LiteMobile``, the feature map layer of MF-DETR's M-F- blocks, for inference."""

    def forward(self, level: LevelMap, queries: Tensor) -> Tensor:
        """See ``LiteMobile.forward``."""
        if level.padding is not None or not _is_one_image(level.x, self.depthwise):
            return super().forward(level, queries)
        hidden = self.depthwise(level.as_image(level.x))
        hidden, factor = scaled_prelu(self.act, hidden, queries[:, 0])
        out = convolve(self.pointwise, hidden, factor)
        return level.x + out.flatten(2).transpose(1, 2)


def scaled_prelu(act: DynamicReLU, x: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
    """Splits a dynamic ReLU into a PReLU and a factor for each channel.

    Takes a map (1, C, H, W) and a token (1, D). Returns the map after the PReLU, and the factor
    (C,).
    """
    low, high = sort_slopes(act.theta(token))
    factor = high.flatten().clamp(min=_MIN_SLOPE)
    return F.prelu(x, low.flatten() / factor), factor


def convolve(convolution: Conv2d, x: Tensor, factor: Tensor) -> Tensor:
    """Applies a pointwise or depthwise convolution and its norm to a map (1, C, H, W).

    ``factor`` (C,) scales the channels of ``x``.
    """
    is_pointwise = convolution.groups == 1
    scale = factor[:, None, None] if is_pointwise else factor[:, None, None, None]
    y = F.conv2d(
        x,
        convolution.weight * scale,
        convolution.bias,
        convolution.stride,
        convolution.padding,
        convolution.dilation,
        convolution.groups,
    )
    return y if convolution.norm is None else convolution.norm(y)


def _is_one_image(x: Tensor, convolution: Conv2d) -> bool:
    """Whether ``x`` is a single image in inference, in the precision of the weights."""
    is_one = len(x) == 1 and x.dtype == convolution.weight.dtype
    return is_one and not torch.is_grad_enabled()
