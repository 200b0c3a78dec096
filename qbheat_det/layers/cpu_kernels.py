# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Linear layers, dropout, Detectron2's convolutions and dynamic ReLU, optimized for CPUs.

On AVX-512 processors of other vendors than Intel, linear layers with many rows are computed as 1x1
convolutions, because MKL's matrix product is only half as fast as oneDNN's convolution there
(docs/performance.md).

Convolutions fold a frozen BatchNorm into their weights. Results are equal to Detectron2's up to
rounding, and parameters have the same names.

Dynamic ReLU: arXiv:2003.10027 (variant B). As in Mobile-Former, arXiv:2108.05895, the first global
token determines the slopes.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal

import numpy as np
import torch
from detectron2.layers import Conv2d, FrozenBatchNorm2d
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.jit._trace import is_tracing
from torch.nn import functional as F

from qbheat_det.core.environment import read_cpu_field

_STEPS = 1 << 16  # resolution of dropout rates
_MIN_ROWS = 64  # with fewer rows, a convolution is slower
# torch 2.6 has no is_exporting.
_is_exporting = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)

RecordedForm = Literal["", "float", "int8", "bfloat16"]
exported_form: ContextVar[RecordedForm] = ContextVar("exported_form", default="")
"""What is exported: an ONNX file ("float", or "int8" if all weights are constants), a bfloat16
program for the CPU with channels-last feature maps ("bfloat16"), or nothing ("")."""


@contextmanager
def recorded_as(form: RecordedForm) -> Iterator[None]:
    """Sets ``exported_form`` within a ``with`` block."""
    before = exported_form.set(form)
    try:
        yield
    finally:
        exported_form.reset(before)


def is_recorded() -> bool:
    """Whether a compiler or exporter traces the operations, which then use plain formulas."""
    return torch.compiler.is_compiling() or is_tracing()


def is_half_program() -> bool:
    """Whether a bfloat16 program for the CPU is exported."""
    return exported_form.get() == "bfloat16"


class Dropout(nn.Dropout):
    """Faster ``torch.nn.Dropout``. On CPUs, rate and scale are rounded to 16 bits."""

    def forward(self, input: Tensor) -> Tensor:
        """Returns a tensor of the same shape."""
        drops = self.training and 0 < self.p < 1
        if not drops or input.device.type != "cpu" or is_recorded():
            return super().forward(input)
        return input * draw_kept(input.shape, self.p) / (1 - rounded(self.p))


def draw_kept(shape: tuple[int, ...], rate: float) -> Tensor:
    """Returns a random int8 mask, which is 0 with probability ``rounded(rate)`` and otherwise 1.

    NumPy draws 64-bit words, each for four values, which is seven times as fast as PyTorch's
    dropout. PyTorch's generator seeds NumPy's for each mask, so one seed determines all masks.
    Multiplication is fastest with int8.
    """
    count = torch.Size(shape).numel()
    generator = np.random.SFC64(int(torch.randint(1 << 62, (), device="cpu")))
    words = torch.from_numpy(generator.random_raw(-(-count // 4)).view(np.int16))
    limit = round(rounded(rate) * _STEPS) - _STEPS // 2
    return (words[:count] >= limit).view(torch.int8).view(shape)


def rounded(rate: float) -> float:
    """Returns a dropout rate, rounded to 16 bits and below 1."""
    return min(round(rate * _STEPS), _STEPS - 1) / _STEPS


class Linear(nn.Linear):
    """``torch.nn.Linear`` that calls ``linear``."""

    def forward(self, input: Tensor) -> Tensor:
        """Takes features (..., C) and returns features (..., C')."""
        return linear(input, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Same as ``torch.nn.functional.linear``. ``x`` is (..., C), ``weight`` (C', C)."""
    if not _uses_convolution(x, weight):
        return F.linear(x, weight, bias)
    image = x.reshape(1, -1, 1, x.shape[-1]).permute(0, 3, 1, 2)  # (1, C, rows, 1)
    y = F.conv2d(image, weight[:, :, None, None], bias)
    return y.permute(0, 2, 3, 1).reshape(*x.shape[:-1], len(weight))


def replace_linear_layers(module: nn.Module) -> None:
    """Replaces each ``nn.Linear`` inside a module by ``Linear``. Parameters keep their names."""
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if type(child) is nn.Linear:
                layer = Linear(child.in_features, child.out_features, device="meta")
                layer.weight, layer.bias = child.weight, child.bias
                setattr(parent, name, layer.train(child.training))


def _uses_convolution(x: Tensor, weight: Tensor) -> bool:
    if x.device.type != "cpu" or not x.dtype == weight.dtype == torch.float32:
        return False
    if is_tracing() or _is_exporting() or torch.is_autocast_enabled("cpu"):
        return False
    if not torch.compiler.is_compiling() and torch.get_num_threads() == 1:
        return False  # with one thread, PyTorch does not use oneDNN for 1x1 convolutions
    return prefers_convolutions() and x.numel() >= _MIN_ROWS * x.shape[-1] > 0


@torch.compiler.assume_constant_result
def prefers_convolutions() -> bool:
    """Whether 1x1 convolutions are faster than matrix products on this machine."""
    return _look_up_processor()


@functools.cache
def _look_up_processor() -> bool:
    # The answer is looked up, not timed, so that all runs on one machine give the same results.
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return False
    is_intel_or_unknown = read_cpu_field("vendor_id") in ("", "GenuineIntel")
    return torch.backends.cpu.get_cpu_capability() == "AVX512" and not is_intel_or_unknown


class NormedConv2d(Conv2d):
    """Detectron2's ``Conv2d``, with a frozen BatchNorm folded into the weights."""

    def forward(self, x: Tensor) -> Tensor:
        """Takes a feature map (N, C, H, W) and returns a feature map (N, C', H', W')."""
        if is_recorded() or self.activation is not None:
            found: Tensor = super().forward(x)  # compilers and exporters fold norms themselves
            return found
        if type(self.norm) is FrozenBatchNorm2d and not _is_watched(self.norm):
            return self._convolve(x, *self._folded(self.norm))
        y = self._convolve(x, self.weight, self.bias)
        return y if self.norm is None else self.norm(y)

    def _convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        placed = self.stride, self.padding, self.dilation
        return F.conv2d(x, weight, bias, *placed, self.groups)

    def _folded(self, norm: FrozenBatchNorm2d) -> tuple[Tensor, Tensor]:
        scale = norm.weight * (norm.running_var + norm.eps).rsqrt()
        shift = norm.bias - norm.running_mean * scale
        if self.bias is not None:
            shift = shift + self.bias * scale
        dtype = self.weight.dtype  # the norm may be in float32 if the weights are not
        return (self.weight * scale[:, None, None, None]).to(dtype), shift.to(dtype)


def _is_watched(module: nn.Module) -> bool:
    """Whether a module has forward or backward hooks."""
    forward = module._forward_hooks or module._forward_pre_hooks
    return bool(forward or module._backward_hooks or module._backward_pre_hooks)


class DynamicReLU(nn.Module):
    """Computes max(a1 * x, a2 * x). Per channel, a token determines a1 in [0, 2], a2 in [-1, 1]."""

    def __init__(self, *, token_dim: int, channels: int) -> None:
        super().__init__()
        self.squeeze = nn.Linear(token_dim, token_dim // 4)
        self.slopes = nn.Linear(token_dim // 4, 2 * channels)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initializes weights near zero, so that slopes are near 1 and 0, as in a plain ReLU."""
        for layer in (self.squeeze, self.slopes):
            nn.init.normal_(layer.weight, std=0.01)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor, token: Tensor) -> Tensor:
        """Takes a feature map (N, C, H, W) and a token (N, D). Returns (N, C, H, W)."""
        # max(a1 x, a2 x) = lo x + (hi - lo) relu(x) stores one feature map for the backward pass.
        theta = self._theta(token)
        if is_recorded() or x.dtype != theta.dtype:
            low, high = _bounds(theta)
            return torch.maximum(low * x, high * x)  # compilers fuse it
        if torch.is_grad_enabled():
            return _TwoSlopes.apply(x, theta)
        return _two_slopes(x, *_bounds(theta))

    def bounds(self, token: Tensor, order: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Takes tokens (N, D). Returns the smaller and larger slope per channel, (N, C, 1, 1) each.

        If given, ``order`` (C,) lists the channels in the order of the result.
        """
        return _bounds(self._theta(token, order))

    def _theta(self, token: Tensor, order: Tensor | None = None) -> Tensor:
        layer: tuple[Tensor, Tensor] = (self.slopes.weight, self.slopes.bias)
        if order is not None:
            both = torch.cat([order, order + len(order)])
            layer = (layer[0][both], layer[1][both])
        return F.hardsigmoid(F.linear(F.relu(self.squeeze(token)), *layer))


def _bounds(theta: Tensor) -> tuple[Tensor, Tensor]:
    """Takes ``theta`` (N, 2 C) in [0, 1]. Returns the smaller and larger slope (N, C, 1, 1)."""
    positive, negative = theta[:, :, None, None].chunk(2, dim=1)
    a1, a2 = 2 * positive, 2 * negative - 1
    return torch.minimum(a1, a2), torch.maximum(a1, a2)


class _TwoSlopes(torch.autograd.Function):
    """low x + (high - low) relu(x). Stores only x, and makes few passes over feature maps."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, theta: Tensor) -> Tensor:
        ctx.save_for_backward(x, theta)
        return _two_slopes(x, *_bounds(theta))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, theta = ctx.saved_tensors
        low, high = _bounds(theta)
        above = torch.ops.aten.threshold_backward(gradient, x, 0)  # where x > 0
        of_high = (above * x).sum(dim=(2, 3))
        of_low = (gradient * x).sum(dim=(2, 3)) - of_high
        of_both = torch.cat([of_high, of_low], dim=1)
        positive, negative = theta.chunk(2, dim=1)
        swapped = 2 * positive < 2 * negative - 1  # the first slope is the smaller
        if x.device.type != "cpu" or swapped.any():  # any() would synchronize with a GPU
            other = torch.cat([of_low, of_high], dim=1)
            of_both = torch.where(torch.cat([swapped, swapped], dim=1), other, of_both)
        return _add_product(above.mul_(high - low), gradient, low), 2 * of_both


def _two_slopes(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    # Uses one buffer, because on CPUs allocating a large tensor takes longer than the arithmetic.
    return _add_product(F.relu(x).mul_(high - low), x, low)


def _add_product(total: Tensor, x: Tensor, factor: Tensor) -> Tensor:
    """Adds ``factor * x`` to ``total`` in place."""
    if total.dtype == torch.bfloat16:  # addcmul_ is slow in bfloat16
        return total.add_(x * factor)
    return total.addcmul_(x, factor)
