# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Folds BatchNorm into convolutions, and fuses Mobile-Former's and MF-DETR's blocks for inference.

Fused blocks make fewer passes over wide feature maps, and equal the plain blocks up to rounding:

* A dynamic ReLU, max(a1 x, a2 x), is a PReLU times the larger slope. The PReLU is one pass over the
  feature map. The larger slope, one number per channel, is multiplied into the weights of the next
  convolution.
* In oneDNN, depthwise convolutions are fast with one output per input channel, and slow with
  several. So one convolution computes the first output of every input channel, another one computes
  the second output, and so on. The next convolution reads the channels in this order ("by turns").
* Position encodings are cached for the last few sizes of feature maps.

Fused forms are used for one unpadded image without gradients, also in exported float files for one
image. Otherwise, a fused block calls the plain block. In bfloat16 programs, fused blocks only split
the depthwise convolutions, because the compiler packs weights only if they are constant.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from detectron2.layers import Conv2d, FrozenBatchNorm2d, NaiveSyncBatchNorm
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.fusion import fuse_conv_bn_weights

from qbheat_det.layers import (
    DownMobile,
    DynamicReLU,
    LiteBottleneck,
    Mobile,
    NormedConv2d,
    SinePositionEncoding,
)
from qbheat_det.layers.cpu_kernels import exported_form, is_half_program, is_recorded
from qbheat_det.modeling.detr.decoder_block import LevelMap, LiteMobile

_MIN_SLOPE = 1e-12  # lower bound of the larger slope, which is a divisor
_MAX_ENCODINGS = 6  # enough for three levels of a decoder and two image sizes

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
                convolution, norm = module[index], module[index + 1]
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
        type(convolution) in (nn.Conv2d, Conv2d, NormedConv2d)
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


class _Fused(nn.Module):
    """Base class for the fused form of a ``plain`` block."""

    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.plain = plain


class FusedMobile(_Fused):
    """``Mobile`` for inference."""

    stride = 1

    def forward(self, x: Tensor, token: Tensor, padding: Tensor | None = None) -> Tensor:
        block = self.plain
        if padding is not None or is_half_program() or not _can_fuse(x, block.expand):
            return block(x, token, padding)
        if is_recorded() and block.expand.norm is None:
            hidden = block.depthwise(convolve_and_bend(block.expand, block.expand_act, x, token))
        else:
            hidden, factor = scaled_prelu(block.expand_act, block.expand(x), token)
            hidden = convolve(block.depthwise, hidden, factor)
        hidden, factor = scaled_prelu(block.depthwise_act, hidden, token)
        out = convolve(block.reduce, hidden, factor)
        return out.add_(x) if block.has_identity else out


class FusedDownMobile(_Fused):
    """``DownMobile`` for inference."""

    stride = 2

    def forward(self, x: Tensor, token: Tensor, padding: Tensor | None = None) -> Tensor:
        block = self.plain
        has_norm = block.down.norm is not None or block.depthwise.norm is not None
        is_half = is_half_program()
        if padding is not None or not _can_fuse(x, block.down) or (is_half and has_norm):
            return block(x, token, padding)
        if is_half:
            hidden, order = convolve_by_turns(block.down, block.down_act, x, token)
            y = convolve(block.down_reduce, hidden, order=order)
            hidden, order = convolve_by_turns(block.depthwise, block.depthwise_act, y, token)
            return y + convolve(block.reduce, hidden, order=order)
        y = convolve(block.down_reduce, *scaled_prelu(block.down_act, block.down(x), token))
        hidden, factor = scaled_prelu(block.depthwise_act, block.depthwise(y), token)
        return convolve(block.reduce, hidden, factor).add_(y)


class FusedLiteBottleneck(_Fused):
    """``LiteBottleneck`` for inference, with folded BatchNorms."""

    def __init__(self, plain: LiteBottleneck) -> None:
        super().__init__(plain)
        self.stride = plain.stride

    def forward(
        self, x: Tensor, tokens: Tensor, padding: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        depthwise = self.plain.depthwise
        has_norm = depthwise.norm is not None
        is_plain = padding is not None or has_norm or not self.plain.has_identity
        if is_plain or not _can_fuse(x, depthwise):
            return self.plain(x, tokens, padding)
        channels = x.shape[1]
        order = interleaved_order(depthwise)
        if is_recorded():
            parts = [
                convolve_rows(depthwise, x, rows).clamp(0, 6) for rows in order.split(channels)
            ]
            return x + convolve(self.plain.pointwise, torch.cat(parts, dim=1), order=order), tokens
        # Each ReLU6 writes directly to its channels of one channels-last tensor.
        hidden = x.new_empty(len(x), *x.shape[2:], len(order)).permute(0, 3, 1, 2)
        for start in range(0, len(order), channels):
            y = convolve_rows(depthwise, x, order[start : start + channels])
            torch.clamp(y, 0, 6, out=hidden[:, start : start + channels])
        return convolve(self.plain.pointwise, hidden, order=order).add_(x), tokens


class FusedLiteMobile(_Fused):
    """``LiteMobile``, the feature map layer of MF-DETR's M-F- blocks, for inference."""

    def forward(self, level: LevelMap, queries: Tensor) -> Tensor:
        depthwise = self.plain.depthwise
        has_norm = depthwise.norm is not None
        if level.padding is not None or has_norm or not _can_fuse(level.x, depthwise):
            return self.plain(level, queries)
        image = level.as_image(level.x)
        order: Tensor | None
        if is_half_program():
            hidden, order = convolve_by_turns(depthwise, self.plain.act, image, queries[:, 0])
            out = convolve(self.plain.pointwise, hidden, order=order)
            return out.flatten(2).transpose(1, 2) + level.x
        if is_recorded():
            order, hidden = None, depthwise(image)
        else:
            order = interleaved_order(depthwise)
            parts = [convolve_rows(depthwise, image, rows) for rows in order.split(image.shape[1])]
            hidden = torch.cat(parts, dim=1)
        hidden, factor = scaled_prelu(self.plain.act, hidden, queries[:, 0], order)
        out = convolve(self.plain.pointwise, hidden, factor, order)
        return out.flatten(2).transpose(1, 2) + level.x


class CachedPositionEncoding(_Fused):
    """``SinePositionEncoding`` that caches the encodings of the last few sizes."""

    def __init__(self, plain: SinePositionEncoding) -> None:
        super().__init__(plain)
        self._encodings: dict[tuple[object, ...], Tensor] = {}

    def forward(self, size: Sequence[int], padding: Tensor | None = None) -> Tensor:
        if padding is not None or torch.is_grad_enabled() or is_recorded():
            return self.plain(size, padding)
        frequency = self.plain.frequency
        key = *size, frequency.device, frequency.dtype
        encoding = self._encodings.pop(key, None)
        if encoding is None:
            encoding = self.plain(size)
        self._encodings[key] = encoding  # moves it to the newest position
        if len(self._encodings) > _MAX_ENCODINGS:
            self._encodings.pop(next(iter(self._encodings)), None)
        return encoding

    def wave(self, position: Tensor) -> Tensor:
        return self.plain.wave(position)


FUSED_BLOCKS: dict[type[nn.Module], Callable[..., nn.Module]] = {
    Mobile: FusedMobile,
    DownMobile: FusedDownMobile,
    LiteBottleneck: FusedLiteBottleneck,
    LiteMobile: FusedLiteMobile,
    SinePositionEncoding: CachedPositionEncoding,
}
"""Maps each plain block to its fused form."""


def fuse_blocks(model: nn.Module) -> int:
    """Replaces all blocks in a model that have a fused form; returns their number."""
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) in FUSED_BLOCKS
    ]
    for parent, name, child in found:
        setattr(parent, name, FUSED_BLOCKS[type(child)](child))
    return len(found)


def scaled_prelu(
    act: DynamicReLU, x: Tensor, token: Tensor, order: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Splits a dynamic ReLU into a PReLU and a factor for each channel.

    Takes a map (1, C, H, W) and a token (1, D). Returns the map after the PReLU, and the factor
    (C,). Channel ``i`` of ``x`` uses the slopes of channel ``order[i]`` of the ReLU.
    """
    low, high = (slope.flatten() for slope in act.bounds(token))
    if order is not None:
        low, high = low[order], high[order]
    high = high.clamp(min=_MIN_SLOPE)
    if is_recorded():  # onnxruntime computes a PReLU with one thread
        return torch.maximum(x, (low / high).view(1, -1, 1, 1) * x), high
    return F.prelu(x, low / high), high


def convolve_and_bend(
    convolution: NormedConv2d, act: DynamicReLU, x: Tensor, token: Tensor
) -> Tensor:
    """Applies a pointwise convolution without norm, then a dynamic ReLU, to (1, C, H, W).

    The factors of the ReLU are multiplied into this convolution. Runtimes would be slow if the
    weights of the next, depthwise convolution depended on the image.
    """
    low, high = (slope.flatten() for slope in act.bounds(token))
    high = high.clamp(min=_MIN_SLOPE)
    bias = None if convolution.bias is None else convolution.bias * high
    y = F.conv2d(x, convolution.weight * high[:, None, None, None], bias)
    return torch.maximum(y, (low / high).view(1, -1, 1, 1) * y)


def convolve(
    convolution: NormedConv2d, x: Tensor, factor: Tensor | None = None, order: Tensor | None = None
) -> Tensor:
    """Applies a pointwise or depthwise convolution and its norm to a map (1, C, H, W).

    ``factor`` (C,) scales the channels of ``x``. If ``order`` (C,) is given, channel ``i`` of ``x``
    is multiplied with the weights of input channel ``order[i]``.
    """
    weight = convolution.weight
    if order is not None:
        weight = weight[:, order]
    if factor is not None:
        pointwise = convolution.groups == 1
        weight = weight * (factor[:, None, None] if pointwise else factor[:, None, None, None])
    y = F.conv2d(
        x, weight, convolution.bias, convolution.stride, convolution.padding, 1, convolution.groups
    )
    return y if convolution.norm is None else convolution.norm(y)


def convolve_by_turns(
    convolution: NormedConv2d, act: DynamicReLU, x: Tensor, token: Tensor
) -> tuple[Tensor, Tensor]:
    """Applies a depthwise convolution without norm, then a dynamic ReLU (bfloat16 programs).

    Takes maps (N, C, H, W) and tokens (N, D). Returns maps (N, C k, H', W') and the order of their
    channels (C k,), see ``interleaved_order``. The compiler fuses ReLU and concatenation.
    """
    order = interleaved_order(convolution)
    slopes = zip(*(each.split(x.shape[1], dim=1) for each in act.bounds(token, order)), strict=True)
    parts = []
    for rows, (low, high) in zip(order.split(x.shape[1]), slopes, strict=True):
        part = convolve_rows(convolution, x, rows)
        parts.append(torch.maximum(low * part, high * part))
    return torch.cat(parts, dim=1), order


def interleaved_order(convolution: NormedConv2d) -> Tensor:
    """Returns output channels (C k,): the first of every input channel, then the second, …"""
    channels = np.arange(convolution.out_channels).reshape(convolution.groups, -1)
    return torch.from_numpy(channels.T.ravel()).to(convolution.weight.device)  # not in a graph


def convolve_rows(convolution: NormedConv2d, x: Tensor, rows: Tensor) -> Tensor:
    """Computes one output channel per input channel of a depthwise convolution, without norm.

    Takes maps (N, C, H, W) and the output channels ``rows`` (C,), and returns (N, C, H', W').
    """
    bias = None if convolution.bias is None else convolution.bias[rows]
    return F.conv2d(
        x, convolution.weight[rows], bias, convolution.stride, convolution.padding, 1, len(rows)
    )


def _can_fuse(x: Tensor, convolution: NormedConv2d) -> bool:
    """Whether ``x`` is a single image in inference, or a bfloat16 program is exported."""
    if is_half_program():
        return True
    if is_recorded() and not (exported_form.get() == "float" and type(x.shape[0]) is int):
        return False
    is_single = len(x) == 1 and x.dtype == convolution.weight.dtype
    return is_single and not torch.is_grad_enabled()
