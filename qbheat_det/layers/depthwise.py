# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Trains depthwise convolutions only with the fast kernels of oneDNN.

On CPUs, oneDNN lacks two fast kernels (docs/performance.md): for the gradient of weights with more
than three columns, and in bfloat16 for the gradient of the input of a convolution with a stride.
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

    It changes those with a stride or with more than three columns. Losses and gradients are the
    same up to rounding. Evaluation, copies of the model and parameter names stay the same.
    """
    for module in model.modules():
        if not isinstance(module, nn.Conv2d) or not 1 < module.groups == module.in_channels:
            continue
        is_slow = max(module.stride) > 1 or module.kernel_size[1] > _COLUMNS
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
    return cast(Tensor, _Depthwise.apply(x, weight, bias, stride, padding, dilation))


class _Depthwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *places: Pair) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.places = places  # stride, padding, dilation
        return F.conv2d(x, weight, bias, *places, x.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            tensors = gradient, x, weight
            if max(ctx.places[0]) > 1 and x.dtype == torch.bfloat16:
                tensors = gradient.float(), x.float(), weight.float()
            of_x = _gradients(*tensors, *ctx.places)[0].to(x.dtype)
        if ctx.needs_input_grad[1]:
            of_weight = _gradient_of_weight(gradient, x, weight, *ctx.places)
        if ctx.needs_input_grad[2]:
            of_bias = gradient.sum(dim=(0, 2, 3))
        return of_x, of_weight, of_bias, None, None, None


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
