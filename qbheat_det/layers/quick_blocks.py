# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Blocks of Mobile-Former with fewer passes over wide maps, in inference.

max(a1 u, a2 u) is a PReLU times the larger slope. The PReLU is one pass over the map, and the
factor, one a channel, goes into the few weights of the convolution behind it.

oneDNN is slow at depthwise convolutions that give several channels for one. Those of one for one
are not: the first channel of each, then the second of each, and so on, and the convolution behind
reads them in that order.

Codes of positions are worked out once for each of the last few sizes of maps.

One image without padding goes this way; compilers, exporters and batches see the plain blocks.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qbheat_det.layers.convolutions import DynamicReLU
from qbheat_det.layers.cpu_kernels import is_recorded
from qbheat_det.layers.padded_maps import SinePositionEncoding

from .mobile_former_block import DownMobile, LiteBottleneck, Mobile

_LEAST = 1e-12  # what slopes are divided by
_MOST_CODES = 6  # sizes of maps whose codes are kept: of a decoder's levels, two images' sizes


def quicken_blocks(model: nn.Module) -> int:
    """Has the blocks of a model compute so, in place; returns how many there are.

    Args:
        model: on the CPU, in evaluation mode, with its BatchNorms folded.
    """
    count = 0
    for module in model.modules():
        if type(module) in QUICK_BLOCKS:
            module.__class__ = QUICK_BLOCKS[type(module)]
            count += 1
    return count


class _QuickMobile(Mobile):
    def forward(self, x: Tensor, token: Tensor, padding: Tensor | None = None) -> Tensor:
        if padding is not None or not fits(x, self.expand):
            return super().forward(x, token, padding)
        hidden, factor = bend(self.expand_act, self.expand(x), token)
        hidden, factor = bend(self.depthwise_act, convolve(self.depthwise, hidden, factor), token)
        out = convolve(self.reduce, hidden, factor)
        return out.add_(x) if self.has_identity else out


class _QuickDownMobile(DownMobile):
    def forward(self, x: Tensor, token: Tensor, padding: Tensor | None = None) -> Tensor:
        if padding is not None or not fits(x, self.down):
            return super().forward(x, token, padding)
        y = convolve(self.down_reduce, *bend(self.down_act, self.down(x), token))
        hidden, factor = bend(self.depthwise_act, self.depthwise(y), token)
        return convolve(self.reduce, hidden, factor).add_(y)


class _QuickLiteBottleneck(LiteBottleneck):
    def forward(
        self, x: Tensor, tokens: Tensor, padding: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if padding is not None or not fits(x, self.depthwise) or self.depthwise.norm is not None:
            return super().forward(x, tokens, padding)
        channels = x.shape[1]
        order = by_turn(self.depthwise)
        hidden = x.new_empty(len(x), *x.shape[2:], len(order)).permute(0, 3, 1, 2)
        for start in range(0, len(order), channels):
            found = part(self.depthwise, x, order[start : start + channels])
            torch.clamp(found, 0, 6, out=hidden[:, start : start + channels])
        return convolve(self.pointwise, hidden, order=order).add_(x), tokens


class _QuickPositionEncoding(SinePositionEncoding):
    def forward(self, size: Sequence[int], padding: Tensor | None = None) -> Tensor:
        if padding is not None or torch.is_grad_enabled() or is_recorded():
            return super().forward(size, padding)
        codes: dict[Any, Tensor] = self.__dict__.setdefault("_codes", {})
        key = tuple(size), self.frequency.device, self.frequency.dtype
        code = codes.pop(key, None)  # and put back as the newest
        codes[key] = code = super().forward(size) if code is None else code
        if len(codes) > _MOST_CODES:
            codes.pop(next(iter(codes)), None)
        return code


QUICK_BLOCKS: dict[type[nn.Module], type[nn.Module]] = {
    LiteBottleneck: _QuickLiteBottleneck,
    Mobile: _QuickMobile,
    DownMobile: _QuickDownMobile,
    SinePositionEncoding: _QuickPositionEncoding,
}
"""The class of a block that computes so, by the block's own; heads add theirs."""


def fits(x: Tensor, convolution: Any) -> bool:
    """Whether a block takes the quick way: one image, no gradient, nobody records."""
    alone = len(x) == 1 and x.dtype == convolution.weight.dtype
    return alone and not (torch.is_grad_enabled() or is_recorded())


def bend(
    act: DynamicReLU, x: Tensor, token: Tensor, order: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns the dynamic ReLU of a map (1, C, H, W) but for a factor a channel, and that (C,)."""
    low, high = (each.flatten() for each in act.bounds(token))
    if order is not None:
        low, high = low[order], high[order]
    high = high.clamp(min=_LEAST)
    return F.prelu(x, low / high), high


def convolve(
    convolution: Any, x: Tensor, factor: Tensor | None = None, order: Tensor | None = None
) -> Tensor:
    """Convolves a map times a factor a channel, whose channels may lie in another order."""
    weight = convolution.weight
    if order is not None:
        weight = weight[:, order]
    if factor is not None:
        own = convolution.groups == 1
        weight = weight * (factor[:, None, None] if own else factor[:, None, None, None])
    y = F.conv2d(
        x, weight, convolution.bias, convolution.stride, convolution.padding, 1, convolution.groups
    )
    return y if convolution.norm is None else convolution.norm(y)


def by_turn(convolution: Any) -> Tensor:
    """Returns output channels in their new order: the first of each input channel, and so on."""
    count = torch.arange(convolution.out_channels, device=convolution.weight.device)
    return count.view(convolution.groups, -1).t().flatten()


def part(convolution: Any, x: Tensor, rows: Tensor) -> Tensor:
    """Convolves to one output channel of each input channel, ``rows`` of them."""
    bias = None if convolution.bias is None else convolution.bias[rows]
    weight = convolution.weight[rows]
    return F.conv2d(x, weight, bias, convolution.stride, convolution.padding, 1, len(rows))
