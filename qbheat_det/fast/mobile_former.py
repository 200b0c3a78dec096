# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Blocks of Mobile-Former and MF-DETR for one image, with fewer passes over wide feature maps.

* A dynamic ReLU computes max(low x, high x), where low and high are the smaller and the larger
  slope. This equals high times a PReLU of slope low / high. The PReLU is one pass over the feature
  map. The factor high, one number per channel, is multiplied into the weights of the next
  convolution.
* In oneDNN, depthwise convolutions are fast with one output per input channel, and slow with
  several. Therefore a depthwise convolution with k outputs per input channel is split into k
  convolutions: the first computes the first output of every input channel, and so on. The
  concatenated outputs are in another order, so the weights of the next convolution are reordered.

A block uses this for one unpadded image without gradients. Otherwise it computes as the plain
block. Exported files do not use these blocks, because there they save only 3 to 4 %.
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
        """Takes a feature map (N, C, H, W) and a token (N, D). Returns a map (N, C', H, W)."""
        if padding is not None or not _is_one_image(x, self.expand):
            return super().forward(x, token, padding)
        hidden, factor = scaled_prelu(self.expand_act, self.expand(x), token)
        hidden = convolve(self.depthwise, hidden, factor)
        hidden, factor = scaled_prelu(self.depthwise_act, hidden, token)
        out = convolve(self.reduce, hidden, factor)
        if self.has_identity:
            out.add_(x)
        return out


class FusedDownMobile(FastForm, DownMobile):
    """``DownMobile`` for inference."""

    def forward(self, x: Tensor, token: Tensor, padding: Tensor | None = None) -> Tensor:
        """Takes a map (N, C, H, W) and a token (N, D). Returns a map of half the resolution."""
        if padding is not None or not _is_one_image(x, self.down):
            return super().forward(x, token, padding)
        hidden, factor = scaled_prelu(self.down_act, self.down(x), token)
        y = convolve(self.down_reduce, hidden, factor)
        hidden, factor = scaled_prelu(self.depthwise_act, self.depthwise(y), token)
        return convolve(self.reduce, hidden, factor).add_(y)


class FusedLiteBottleneck(FastForm, LiteBottleneck):
    """``LiteBottleneck`` for inference.

    Used only if the norms are folded, and the output has the shape of the input.
    """

    @classmethod
    def is_faster_for(cls, layer: nn.Module) -> bool:
        assert isinstance(layer, LiteBottleneck)
        return layer.has_identity and layer.depthwise.norm is None

    def forward(
        self, x: Tensor, tokens: Tensor, padding: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Takes a map (N, C, H, W) and tokens (N, M, D). Returns a map (N, C, H, W) and tokens."""
        if padding is not None or not _is_one_image(x, self.depthwise):
            return super().forward(x, tokens, padding)
        channels = x.shape[1]
        order = split_order(self.depthwise)  # (C k,)
        # The outputs of all parts, in channels-last format. Each ReLU6 writes its part directly.
        hidden = x.new_empty(len(x), *x.shape[2:], len(order)).permute(0, 3, 1, 2)
        hidden_parts = hidden.split(channels, dim=1)
        for outputs, hidden_part in zip(order.split(channels), hidden_parts, strict=True):
            convolved = convolve_outputs(self.depthwise, x, outputs)
            torch.clamp(convolved, 0, 6, out=hidden_part)
        out = convolve(self.pointwise, hidden, order=order)
        return out.add_(x), tokens


class FusedLiteMobile(FastForm, LiteMobile):
    """``LiteMobile``, the feature map layer of MF-DETR's M-F- blocks, for inference."""

    def forward(self, level: LevelMap, queries: Tensor) -> Tensor:
        """Returns the updated feature map (N, HW, C). ``queries`` are (N, Q, C)."""
        if level.padding is not None or not _is_one_image(level.x, self.depthwise):
            return super().forward(level, queries)
        image = level.as_image(level.x)  # (1, C, H, W)
        channels = image.shape[1]
        order = split_order(self.depthwise)  # (C k,)
        parts = []
        for outputs in order.split(channels):
            parts.append(convolve_outputs(self.depthwise, image, outputs))
        hidden = torch.cat(parts, dim=1)  # (1, C k, H, W)
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
    low, high = sort_slopes(act.theta(token))  # (1, C, 1, 1) each
    low = low.flatten()
    high = high.flatten()
    if order is not None:
        low = low[order]
        high = high[order]
    factor = high.clamp(min=_MIN_SLOPE)
    return F.prelu(x, low / factor), factor


def split_order(depthwise: Conv2d) -> Tensor:
    """Returns the order (C k,) in which a split depthwise convolution computes its outputs.

    The convolution has k outputs for each of C input channels. The order begins with the first
    output of every input channel, followed by the second output of every input channel, and so on.
    """
    channels = torch.arange(depthwise.out_channels, device=depthwise.weight.device)
    by_input = channels.view(depthwise.groups, -1)  # (C, k)
    return by_input.t().flatten()


def convolve_outputs(depthwise: Conv2d, x: Tensor, outputs: Tensor) -> Tensor:
    """Computes one output per input channel of a depthwise convolution without norm.

    Takes a map (1, C, H, W) and the indices (C,) of the output channels. Returns a map
    (1, C, H', W').
    """
    weight = depthwise.weight[outputs]
    bias = None
    if depthwise.bias is not None:
        bias = depthwise.bias[outputs]
    return F.conv2d(
        x,
        weight,
        bias,
        depthwise.stride,
        depthwise.padding,
        depthwise.dilation,
        groups=len(outputs),
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
    if factor is not None and convolution.groups == 1:
        weight = weight * factor[:, None, None]  # pointwise: (C', C, 1, 1)
    elif factor is not None:
        weight = weight * factor[:, None, None, None]  # depthwise: (C, 1, 3, 3)
    y = F.conv2d(
        x,
        weight,
        convolution.bias,
        convolution.stride,
        convolution.padding,
        convolution.dilation,
        convolution.groups,
    )
    if convolution.norm is not None:
        y = convolution.norm(y)
    return y


def _is_one_image(x: Tensor, convolution: Conv2d) -> bool:
    """Returns whether ``x`` is a single image without gradients, in the dtype of the weights."""
    is_single = len(x) == 1
    has_dtype_of_weights = x.dtype == convolution.weight.dtype
    return is_single and has_dtype_of_weights and not torch.is_grad_enabled()
