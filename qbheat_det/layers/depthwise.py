# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Trains depthwise convolutions only with the fast kernels of oneDNN.

On CPUs, oneDNN lacks fast kernels in three cases (docs/performance.md): several outputs per input
channel, the gradient of weights with more than three columns, and in bfloat16 the gradient of the
input of a convolution with a stride.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_COLUMNS = 3  # most columns of a weight with a fast gradient

Pair = tuple[int, int]


def speed_up_depthwise(model: nn.Module) -> None:
    """Lets depthwise convolutions train faster on CPUs, in place.

    It changes those with a stride, with more than three columns, or with several outputs per input
    channel. Losses and gradients are the same up to rounding. Evaluation, copies of the model and
    parameter names stay the same.
    """
    for module in model.modules():
        if not isinstance(module, nn.Conv2d) or not 1 < module.groups == module.in_channels:
            continue
        is_wide = module.out_channels > module.groups
        is_slow = is_wide or max(module.stride) > 1 or module.kernel_size[1] > _COLUMNS
        if is_slow and not isinstance(module.padding, str):
            # ``nn.Module.compile`` uses the same attribute. Copies of a module, such as a moving
            # average, do not have it.
            module._compiled_call_impl = partial(_call, module)


def _call(module: nn.Module, x: Tensor) -> Tensor:
    if not (module.training and x.device.type == "cpu" and torch.is_grad_enabled()):
        return cast(Tensor, module._call_impl(x))
    with _Replacement():
        return cast(Tensor, module._call_impl(x))


class _Replacement(TorchFunctionMode):
    """Calls ``_convolve`` for each ``conv2d`` in a ``with`` block, also in classes of timm."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return (_convolve if func is torch.conv2d else func)(*args, **(kwargs or {}))


def _convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    groups: int,
) -> Tensor:
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    if len(weight) > groups and not x.is_contiguous(memory_format=torch.channels_last):
        return F.conv2d(x, weight, bias, stride, padding, dilation, groups)
    return cast(Tensor, _Depthwise.apply(x, weight, bias, stride, padding, dilation))


class _Depthwise(torch.autograd.Function):
    """A convolution with k outputs per input channel is computed as k convolutions with one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *places: Pair) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.places = places  # stride, padding, dilation
        groups, count = x.shape[1], len(weight) // x.shape[1]
        if count == 1:
            return F.conv2d(x, weight, bias, *places, groups)
        parts: Tensor | None = None
        for k in range(count):
            part = F.conv2d(x, weight[k::count], None, *places, groups).permute(0, 2, 3, 1)
            parts = part.new_empty(*part.shape, count) if parts is None else parts
            parts[..., k] = part  # a copy into one tensor is faster than torch.stack
        assert parts is not None
        y = parts.flatten(3).permute(0, 3, 1, 2)
        return y if bias is None else y.add_(bias[:, None, None])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        count, of_x, of_weight = len(weight) // x.shape[1], None, torch.empty_like(weight)
        for k in range(count):
            part, rows = gradient[:, k::count], weight[k::count]
            if count > 1:
                part = part.contiguous(memory_format=torch.channels_last)
            if needs_x:
                found = _gradient_of_input(part, x, rows, *ctx.places)
                of_x = found if of_x is None else of_x.add_(found)
            if needs_weight:
                of_weight[k::count] = _gradient_of_weight(part, x, rows, *ctx.places)
        return (
            None if of_x is None else of_x.to(x.dtype),
            of_weight if needs_weight else None,
            gradient.sum(dim=(0, 2, 3)) if needs_bias else None,
            *(None for _ in ctx.places),
        )


def _gradient_of_input(
    gradient: Tensor, x: Tensor, weight: Tensor, stride: Pair, padding: Pair, dilation: Pair
) -> Tensor:
    """Returns at least float32, because several gradients may be added."""
    full = torch.promote_types(x.dtype, torch.float32)
    dtype = full if max(stride) > 1 else x.dtype
    tensors = gradient.to(dtype), x.to(dtype), weight.to(dtype)
    return _gradients(*tensors, stride, padding, dilation)[0].to(full)


def _gradient_of_weight(
    gradient: Tensor, x: Tensor, weight: Tensor, stride: Pair, padding: Pair, dilation: Pair
) -> Tensor:
    if weight.shape[3] <= _COLUMNS:
        return _gradients(gradient, x, weight, stride, padding, dilation, of_weight=True)[1]
    found, first = [], -padding[1]  # the column of ``x`` that the next column of ``weight`` reads
    for columns in weight.split(_COLUMNS, dim=3):
        count = 1 + (gradient.shape[3] - 1) * stride[1] + (columns.shape[3] - 1) * dilation[1]
        part = F.pad(x, (-first, first + count - x.shape[3]))
        places = stride, (padding[0], 0), dilation
        found.append(_gradients(gradient, part, columns, *places, of_weight=True)[1])
        first += columns.shape[3] * dilation[1]
    return torch.cat(found, dim=3)


def _gradients(
    gradient: Tensor, x: Tensor, weight: Tensor, *places: Pair, of_weight: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns only the gradient of the input or that of the weight; the others are undefined."""
    wanted = not of_weight, of_weight, False
    found = torch.ops.aten.convolution_backward(
        gradient, x, weight, None, *places, False, (0, 0), x.shape[1], wanted
    )
    return cast(tuple[Tensor, Tensor, Tensor], found)
