# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Depthwise convolutions that train without the slow kernels of oneDNN.

On CPUs, oneDNN lacks fast kernels in two cases (docs/performance.md): the gradient of weights with
more than three columns, and in bfloat16 the gradient of the input of a convolution with a stride.
"""

from typing import Any, cast

import torch
from detectron2.layers import Conv2d
from timm.layers import pad_same
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from qbheat_det.modeling.backbone.timm_backbone import TraceableConv2dSame

from .form import FastForm

_MAX_COLUMNS = 3  # of a weight whose gradient has a fast kernel

Pair = tuple[int, int]


class _Depthwise(FastForm):
    @classmethod
    def is_faster_for(cls, layer: nn.Module) -> bool:
        assert isinstance(layer, nn.Conv2d)
        is_depthwise = 1 < layer.groups == layer.in_channels
        is_slow = max(layer.stride) > 1 or layer.kernel_size[1] > _MAX_COLUMNS
        has_zeros = layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
        return is_depthwise and is_slow and has_zeros


class DepthwiseConv2d(_Depthwise, nn.Conv2d):
    """PyTorch's ``Conv2d`` if it is depthwise."""

    def forward(self, input: Tensor) -> Tensor:
        """Takes a feature map (N, C, H, W) and returns a feature map (N, C', H', W')."""
        return convolve_depthwise(self, input, cast(Pair, self.padding))


class NormedDepthwiseConv2d(_Depthwise, Conv2d):
    """Detectron2's ``Conv2d`` if it is depthwise."""

    def forward(self, x: Tensor) -> Tensor:
        """Takes a feature map (N, C, H, W) and returns a feature map (N, C', H', W')."""
        x = convolve_depthwise(self, x, cast(Pair, self.padding))
        if self.norm is not None:
            x = self.norm(x)
        if self.activation is not None:
            x = self.activation(x)
        return x


class DepthwiseConv2dSame(_Depthwise, TraceableConv2dSame):
    """timm's ``Conv2dSame`` if it is depthwise."""

    def forward(self, x: Tensor) -> Tensor:
        """Takes a feature map (N, C, H, W) and returns a feature map (N, C', H', W')."""
        x = pad_same(x, self.kernel_size, self.stride, self.dilation)
        return convolve_depthwise(self, x, (0, 0))


def convolve_depthwise(layer: nn.Conv2d, x: Tensor, padding: Pair) -> Tensor:
    """Convolves a map (N, C, H, W) with the weights of ``layer``, and ``padding`` in its place."""
    weight = layer.weight
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        x = x.to(dtype)
        weight = weight.to(dtype)
    y = _Convolution.apply(x, weight, layer.stride, padding, layer.dilation, layer.groups)
    return y if layer.bias is None else y + layer.bias[:, None, None].to(y.dtype)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, *places: Any) -> Tensor:
        """``places`` are stride, padding, dilation and groups, as in ``conv2d``."""
        ctx.save_for_backward(x, weight)
        ctx.places = places
        return F.conv2d(x, weight, None, *places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        of_x: Tensor | None = None
        if needs_x:
            of_x = _gradient_of_input(gradient, x, weight, *ctx.places)
        of_weight: Tensor | None = None
        if needs_weight:
            of_weight = _gradient_of_weight(gradient, x, weight, *ctx.places)
        return of_x, of_weight, *(None for _ in ctx.places)


def _gradient_of_input(
    gradient: Tensor, x: Tensor, weight: Tensor, stride: Pair, *places: Any
) -> Tensor:
    dtype = x.dtype
    if max(stride) > 1:  # slow in bfloat16
        dtype = torch.promote_types(x.dtype, torch.float32)
    of_x, _, _ = torch.ops.aten.convolution_backward(
        *(gradient.to(dtype), x.to(dtype), weight.to(dtype)),
        *_arguments(stride, *places),
        (True, False, False),
    )
    return cast(Tensor, of_x).to(x.dtype)


def _gradient_of_weight(
    gradient: Tensor, x: Tensor, weight: Tensor, stride: Pair, padding: Pair, *places: Any
) -> Tensor:
    """Computes the gradient of ``_MAX_COLUMNS`` columns at a time."""
    if weight.shape[3] <= _MAX_COLUMNS:
        return _gradient_of_columns(gradient, x, weight, stride, padding, *places)
    (_, dilation), _ = places
    gradients = []
    first = -padding[1]  # the column of ``x`` that the next column of ``weight`` reads first
    for columns in weight.split(_MAX_COLUMNS, dim=3):
        count = 1 + (gradient.shape[3] - 1) * stride[1] + (columns.shape[3] - 1) * dilation
        read = F.pad(x, (-first, first + count - x.shape[3]))
        padding_of_rows = (padding[0], 0)
        gradients.append(
            _gradient_of_columns(gradient, read, columns, stride, padding_of_rows, *places)
        )
        first += columns.shape[3] * dilation
    return torch.cat(gradients, dim=3)


def _gradient_of_columns(gradient: Tensor, x: Tensor, weight: Tensor, *places: Any) -> Tensor:
    _, of_weight, _ = torch.ops.aten.convolution_backward(
        gradient, x, weight, *_arguments(*places), (False, True, False)
    )
    return cast(Tensor, of_weight)


def _arguments(stride: Pair, padding: Pair, dilation: Pair, groups: int) -> tuple[Any, ...]:
    """Returns those arguments of ``convolution_backward`` that follow the tensors."""
    has_no_bias = None
    is_transposed = False
    output_padding = (0, 0)
    return has_no_bias, stride, padding, dilation, is_transposed, output_padding, groups
