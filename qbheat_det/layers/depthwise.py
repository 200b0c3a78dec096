# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Trains depthwise convolutions without the slow kernels of oneDNN.

On CPUs, oneDNN lacks fast kernels in three cases (docs/performance.md): several outputs per input
channel, the gradient of weights with more than three columns, and in bfloat16 the gradient of the
input of a convolution with a stride.
"""

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
    """Lets the depthwise convolutions of a model train faster on CPUs, in place.

    Changes convolutions that have a stride, more than three columns, or several outputs per input
    channel. Losses and gradients are the same up to rounding. Evaluation and parameter names stay
    the same. Copies of the model do not have the change.
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

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (_convolve if func is torch.conv2d else func)(*args, **(kwargs or {}))


def _convolve(x: Tensor, weight: Tensor, bias: Tensor | None, *places: Any) -> Tensor:
    """Takes the arguments of ``conv2d``. ``places`` are stride, padding, dilation and groups."""
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        x, weight = x.to(dtype), weight.to(dtype)
    if len(weight) > x.shape[1] and not x.is_contiguous(memory_format=torch.channels_last):
        return F.conv2d(x, weight, bias, *places)
    y = cast(Tensor, _Depthwise.apply(x, weight, *places))
    return y if bias is None else y + bias[:, None, None].to(y.dtype)


class _Depthwise(torch.autograd.Function):
    """A convolution with k outputs per input channel is computed as k convolutions with one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, *places: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.places = places
        count, y = len(weight) // x.shape[1], x
        if count == 1:
            return F.conv2d(x, weight, None, *places)
        for k in range(count):
            part = F.conv2d(x, weight[k::count], None, *places).permute(0, 2, 3, 1)
            y = part.new_empty(*part.shape, count) if k == 0 else y
            y[..., k] = part  # a copy into one tensor is faster than torch.stack
        return y.flatten(3).permute(0, 3, 1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        full = torch.promote_types(x.dtype, torch.float32)
        dtype = full if max(ctx.places[0]) > 1 else x.dtype  # in bfloat16, a stride is slow
        of_x: Tensor | None = None
        of_weight = torch.empty_like(weight) if needs_weight else None
        count = len(weight) // x.shape[1]
        for k in range(count):
            part, rows = gradient[:, k::count], weight[k::count]
            if count > 1:
                part = part.contiguous(memory_format=torch.channels_last)
            if needs_x:
                tensors = part.to(dtype), x.to(dtype), rows.to(dtype)
                found = _gradient(*tensors, *ctx.places, of_input=True)
                of_x = found.to(full) if of_x is None else of_x.add_(found)
            if of_weight is not None:
                of_weight[k::count] = _gradient_of_weight(part, x, rows, *ctx.places)
        return None if of_x is None else of_x.to(x.dtype), of_weight, *(None for _ in ctx.places)


def _gradient_of_weight(
    gradient: Tensor, x: Tensor, weight: Tensor, stride: Pair, padding: Pair, *places: Any
) -> Tensor:
    if weight.shape[3] <= _COLUMNS:
        return _gradient(gradient, x, weight, stride, padding, *places, of_input=False)
    (_, dilation), parts = places[0], []
    first = -padding[1]  # the column of ``x`` that the next column of ``weight`` reads first
    for columns in weight.split(_COLUMNS, dim=3):
        count = 1 + (gradient.shape[3] - 1) * stride[1] + (columns.shape[3] - 1) * dilation
        part = F.pad(x, (-first, first + count - x.shape[3]))
        settings = stride, (padding[0], 0), *places
        parts.append(_gradient(gradient, part, columns, *settings, of_input=False))
        first += columns.shape[3] * dilation
    return torch.cat(parts, dim=3)


def _gradient(gradient: Tensor, x: Tensor, weight: Tensor, *places: Any, of_input: bool) -> Tensor:
    """Returns the gradient of the input if ``of_input``, and else that of the weight."""
    *where, groups = places
    wanted = of_input, not of_input, False
    found = torch.ops.aten.convolution_backward(
        gradient, x, weight, None, *where, False, (0, 0), groups, wanted
    )
    return cast(Tensor, found[0 if of_input else 1])
