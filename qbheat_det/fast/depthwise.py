# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Depthwise convolutions that train without the slow kernels of oneDNN.

On CPUs, oneDNN lacks fast kernels for two gradients (docs/performance.md): the gradient of weights
with more than three columns, and in bfloat16 the gradient of the input if the stride is above 1.
"""

from typing import Any, NamedTuple, cast

import torch
from detectron2.layers import Conv2d
from timm.layers import pad_same
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from qbheat_det.modeling.backbone.timm_backbone import TraceableConv2dSame

from .form import FastForm

_MAX_COLUMNS = 3  # only weights with at most 3 columns have a fast kernel for their gradient

Pair = tuple[int, int]


class _Depthwise(FastForm):
    """Base of the fast forms of depthwise convolutions."""

    @classmethod
    def is_faster_for(cls, layer: nn.Module) -> bool:
        assert isinstance(layer, nn.Conv2d)
        return is_slow_depthwise(layer) and pads_with_zeros(layer)

    def convolve(self, x: Tensor, padding: Pair) -> Tensor:
        """Convolves a map (N, C, H, W) with ``padding`` (rows, columns)."""
        assert isinstance(self, nn.Conv2d)
        return convolve_depthwise(x, self.weight, self.bias, Settings.of(self, padding))


class DepthwiseConv2d(_Depthwise, nn.Conv2d):
    """PyTorch's ``Conv2d`` if it is depthwise."""

    def forward(self, input: Tensor) -> Tensor:
        """Takes a feature map (N, C, H, W) and returns a feature map (N, C', H', W')."""
        return self.convolve(input, cast(Pair, self.padding))


class NormedDepthwiseConv2d(_Depthwise, Conv2d):
    """Detectron2's ``Conv2d`` if it is depthwise."""

    def forward(self, x: Tensor) -> Tensor:
        """Takes a feature map (N, C, H, W) and returns a feature map (N, C', H', W')."""
        x = self.convolve(x, cast(Pair, self.padding))
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
        return self.convolve(x, padding=(0, 0))  # x is padded already


def is_slow_depthwise(layer: nn.Conv2d) -> bool:
    """Returns whether a convolution is depthwise, and oneDNN lacks a fast kernel for a gradient."""
    is_depthwise = layer.groups > 1 and layer.groups == layer.in_channels
    return is_depthwise and (max(layer.stride) > 1 or layer.kernel_size[1] > _MAX_COLUMNS)


def pads_with_zeros(layer: nn.Conv2d) -> bool:
    """Returns whether a convolution pads by numbers of zeros, as ``conv2d`` does."""
    return layer.padding_mode == "zeros" and not isinstance(layer.padding, str)


class Settings(NamedTuple):
    """Arguments of ``conv2d``. Pairs are for rows and columns."""

    stride: Pair
    padding: Pair
    dilation: Pair
    groups: int

    @classmethod
    def of(cls, conv: nn.Conv2d, padding: Pair) -> "Settings":
        """Returns those of a layer, with another padding."""
        return cls(cast(Pair, conv.stride), padding, cast(Pair, conv.dilation), conv.groups)


def convolve_depthwise(
    x: Tensor, weight: Tensor, bias: Tensor | None, settings: Settings
) -> Tensor:
    """``conv2d`` of a map (N, C, H, W), with weights (C', 1, rows, columns) and bias (C',)."""
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        x = x.to(dtype)
        weight = weight.to(dtype)
        if bias is not None:
            bias = bias.to(dtype)
    return _Convolution.apply(x, weight, bias, settings)


class _Convolution(torch.autograd.Function):
    """``conv2d``, whose backward pass avoids the slow kernels."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, settings: Settings
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.settings = settings
        return F.conv2d(x, weight, bias, *settings)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_grad_x, needs_grad_weight, needs_grad_bias, *_ = ctx.needs_input_grad
        grad_x: Tensor | None = None
        if needs_grad_x:
            grad_x = _input_gradient(grad_output, x, weight, ctx.settings)
        grad_weight: Tensor | None = None
        if needs_grad_weight:
            grad_weight = _weight_gradient(grad_output, x, weight, ctx.settings)
        grad_bias: Tensor | None = None
        if needs_grad_bias:
            grad_bias = grad_output.sum((0, 2, 3))
        return grad_x, grad_weight, grad_bias, None


def _input_gradient(grad_output: Tensor, x: Tensor, weight: Tensor, settings: Settings) -> Tensor:
    """Returns the gradient of the input ``x`` (N, C, H, W)."""
    dtype = x.dtype
    if max(settings.stride) > 1:
        # With a stride, the kernel for bfloat16 is slow. Other dtypes stay as they are.
        dtype = torch.promote_types(x.dtype, torch.float32)
    # Only the size of ``x`` is needed.
    size_of_x = torch.empty_like(x, dtype=dtype)
    grad_x, _ = _convolution_backward(
        grad_output.to(dtype), size_of_x, weight.to(dtype), settings, needs_grad_x=True
    )
    return cast(Tensor, grad_x).to(x.dtype)


def _weight_gradient(grad_output: Tensor, x: Tensor, weight: Tensor, settings: Settings) -> Tensor:
    """Returns the gradient of ``weight`` (C', 1, rows, columns).

    A weight with more than ``_MAX_COLUMNS`` columns is split into narrow weights, because only
    these have a fast kernel. The gradient of a narrow weight is computed from the columns of ``x``
    that it reads.
    """
    if weight.shape[3] <= _MAX_COLUMNS:
        _, grad_weight = _convolution_backward(
            grad_output, x, weight, settings, needs_grad_weight=True
        )
        return cast(Tensor, grad_weight)
    row_padding, column_padding = settings.padding
    column_stride = settings.stride[1]
    column_dilation = settings.dilation[1]
    output_width = grad_output.shape[3]
    settings_of_narrow = settings._replace(padding=(row_padding, 0))
    gradients = []
    # The first column of ``x`` that a narrow weight reads. It is negative in the padding.
    first_column = -column_padding
    for narrow_weight in weight.split(_MAX_COLUMNS, dim=3):
        num_columns = narrow_weight.shape[3]
        # The number of columns of ``x`` that the narrow weight reads for all outputs.
        width = 1 + (output_width - 1) * column_stride + (num_columns - 1) * column_dilation
        left = -first_column  # F.pad crops if a number is negative
        right = first_column + width - x.shape[3]
        if max(-left, -right) >= x.shape[3]:  # it reads nothing but padding
            gradient: Tensor | None = torch.zeros_like(narrow_weight)
        else:
            _, gradient = _convolution_backward(
                grad_output,
                F.pad(x, (left, right)),
                narrow_weight,
                settings_of_narrow,
                needs_grad_weight=True,
            )
        gradients.append(cast(Tensor, gradient))
        first_column += num_columns * column_dilation
    return torch.cat(gradients, dim=3)


def _convolution_backward(
    grad_output: Tensor,
    x: Tensor,
    weight: Tensor,
    settings: Settings,
    *,
    needs_grad_x: bool = False,
    needs_grad_weight: bool = False,
) -> tuple[Tensor | None, Tensor | None]:
    """Returns PyTorch's gradients of ``x`` and ``weight``. Those not asked for are None."""
    grad_x, grad_weight, _ = torch.ops.aten.convolution_backward(
        grad_output,
        x,
        weight,
        bias_sizes=None,
        stride=settings.stride,
        padding=settings.padding,
        dilation=settings.dilation,
        transposed=False,
        output_padding=(0, 0),
        groups=settings.groups,
        output_mask=(needs_grad_x, needs_grad_weight, False),
    )
    return grad_x, grad_weight
