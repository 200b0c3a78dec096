# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Blocks of Mobile-Former and MF-DETR for one image, with fewer passes over wide feature maps.

* A dynamic ReLU, max(low x, high x), is a PReLU times the larger slope. The PReLU is one pass over
  the feature map. The larger slope, one number per channel, is multiplied into the weights of the
  next convolution.
* In oneDNN, depthwise convolutions are fast with one output per input channel, and slow with
  several. So one convolution computes the first output of every input channel, another one computes
  the second output, and so on. The next convolution reads the channels in this order.

A block does so for one unpadded image without gradients. Otherwise it computes as the plain block.
It is not used in exported files, where it saves only 3 to 4 %.
"""

import torch
from detectron2.layers import Conv2d
from torch import Tensor, nn
from torch.nn import functional as F

from qbheat_det.layers import DownMobile, DynamicReLU, LiteBottleneck, Mobile
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


class FusedLiteBottleneck(FastForm, LiteBottleneck):
    """``LiteBottleneck`` for inference, if its norms are folded and it adds its input."""

    @classmethod
    def is_faster_for(cls, layer: nn.Module) -> bool:
        assert isinstance(layer, LiteBottleneck)
        return layer.has_identity and layer.depthwise.norm is None

    def forward(
        self, x: Tensor, tokens: Tensor, padding: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """See ``LiteBottleneck.forward``."""
        if padding is not None or not _is_one_image(x, self.depthwise):
            return super().forward(x, tokens, padding)
        order = turns(self.depthwise)
        # Each ReLU6 writes directly to its channels of one channels-last tensor.
        hidden = x.new_empty(len(x), *x.shape[2:], len(order)).permute(0, 3, 1, 2)
        parts = hidden.split(x.shape[1], dim=1)
        for rows, part in zip(order.split(x.shape[1]), parts, strict=True):
            torch.clamp(convolve_turn(self.depthwise, x, rows), 0, 6, out=part)
        return convolve(self.pointwise, hidden, order=order).add_(x), tokens


class FusedLiteMobile(FastForm, LiteMobile):
    """``LiteMobile``, the feature map layer of MF-DETR's M-F- blocks, for inference."""

    def forward(self, level: LevelMap, queries: Tensor) -> Tensor:
        """See ``LiteMobile.forward``."""
        if level.padding is not None or not _is_one_image(level.x, self.depthwise):
            return super().forward(level, queries)
        image = level.as_image(level.x)
        order = turns(self.depthwise)
        parts = [convolve_turn(self.depthwise, image, rows) for rows in order.split(image.shape[1])]
        hidden = torch.cat(parts, dim=1)
        hidden, factor = scaled_prelu(self.act, hidden, queries[:, 0], order)
        out = convolve(self.pointwise, hidden, factor, order)
        return level.x + out.flatten(2).transpose(1, 2)


def scaled_prelu(
    act: DynamicReLU, x: Tensor, token: Tensor, order: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Splits a dynamic ReLU into a PReLU and a factor for each channel.

    Takes a map (1, C, H, W) and a token (1, D). Returns the map after the PReLU, and the factor
    (C,). If ``order`` (C,) is given, channel ``i`` of ``x`` uses the slopes of channel
    ``order[i]``.
    """
    low, high = (slope.flatten() for slope in sort_slopes(act.theta(token)))
    if order is not None:
        low = low[order]
        high = high[order]
    factor = high.clamp(min=_MIN_SLOPE)
    return F.prelu(x, low / factor), factor


def turns(depthwise: Conv2d) -> Tensor:
    """Returns the output channels (C k,): the first of every input channel, then the second, …"""
    channels = torch.arange(depthwise.out_channels, device=depthwise.weight.device)
    return channels.view(depthwise.groups, -1).t().flatten()


def convolve_turn(depthwise: Conv2d, x: Tensor, rows: Tensor) -> Tensor:
    """Computes one output channel per input channel of a depthwise convolution without norm.

    Takes a map (1, C, H, W) and the output channels ``rows`` (C,). Returns a map (1, C, H', W').
    """
    weight = depthwise.weight[rows]
    bias = None if depthwise.bias is None else depthwise.bias[rows]
    return F.conv2d(
        x, weight, bias, depthwise.stride, depthwise.padding, depthwise.dilation, len(rows)
    )


def convolve(
    convolution: Conv2d, x: Tensor, factor: Tensor | None = None, order: Tensor | None = None
) -> Tensor:
    """Applies a pointwise or depthwise convolution and its norm to a map (1, C, H, W).

    ``factor`` (C,) scales the channels of ``x``. If ``order`` (C,) is given, channel ``i`` of ``x``
    is multiplied with the weights of input channel ``order[i]``.
    """
    weight = convolution.weight
    if order is not None:
        weight = weight[:, order]
    if factor is not None:
        is_pointwise = convolution.groups == 1
        weight = weight * (factor[:, None, None] if is_pointwise else factor[:, None, None, None])
    y = F.conv2d(
        x,
        weight,
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
