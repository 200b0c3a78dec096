# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Dynamic ReLU in fewer passes over the feature map.

If low and high are the smaller and the larger slope, then max(a1 x, a2 x) equals
low x + (high - low) relu(x). The plain formula stores three feature maps for the backward pass.
This formula stores only x and allocates one feature map. On CPUs, allocating a large tensor takes
longer than the arithmetic.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from qbheat_det.layers import DynamicReLU
from qbheat_det.layers.dynamic_relu import to_slopes

from .form import FastForm


class TwoSlopeReLU(FastForm, DynamicReLU):
    """``DynamicReLU`` for training and inference."""

    def forward(self, x: Tensor, token: Tensor) -> Tensor:
        """Takes a feature map (N, C, H, W) and a token (N, D). Returns (N, C, H, W)."""
        theta = self.theta(token)
        is_autocast = x.dtype != theta.dtype  # only the linear layers are in bfloat16
        if torch.is_grad_enabled() and not is_autocast:
            return _TwoSlopes.apply(x, theta)
        low, high = sort_slopes(theta)
        if is_autocast:
            return torch.maximum(low * x, high * x)
        return _apply_slopes(x, low, high)


def sort_slopes(theta: Tensor) -> tuple[Tensor, Tensor]:
    """Takes theta (N, 2 C) in [0, 1]. Returns the smaller and larger slope, (N, C, 1, 1) each."""
    a1, a2 = to_slopes(theta)
    return torch.minimum(a1, a2), torch.maximum(a1, a2)


class _TwoSlopes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, theta: Tensor) -> Tensor:
        ctx.save_for_backward(x, theta)
        low, high = sort_slopes(theta)
        return _apply_slopes(x, low, high)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor]:
        x, theta = ctx.saved_tensors
        low, high = sort_slopes(theta)
        # The gradient where x > 0, and 0 elsewhere.
        grad_above = torch.ops.aten.threshold_backward(grad_output, x, 0)  # (N, C, H, W)
        # The larger slope applies where x > 0, and the smaller slope elsewhere.
        grad_high = (grad_above * x).sum(dim=(2, 3))  # (N, C)
        grad_low = (grad_output * x).sum(dim=(2, 3)) - grad_high
        # Usually, a1 is the larger slope.
        grad_slopes = torch.cat([grad_high, grad_low], dim=1)  # (N, 2 C), for a1 and a2
        a1, a2 = to_slopes(theta)
        is_swapped = (a1 < a2)[:, :, 0, 0]  # (N, C)
        if x.device.type != "cpu" or is_swapped.any():  # any() would synchronize with a GPU
            swapped = torch.cat([grad_low, grad_high], dim=1)
            is_swapped = torch.cat([is_swapped, is_swapped], dim=1)
            grad_slopes = torch.where(is_swapped, swapped, grad_slopes)
        # Both slopes have the derivative 2 with respect to theta.
        grad_theta = 2 * grad_slopes
        # high where x > 0, low elsewhere
        grad_x = _add_product(grad_above.mul_(high - low), grad_output, low)
        return grad_x, grad_theta


def _apply_slopes(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Computes (high - low) relu(x) + low x."""
    return _add_product(F.relu(x).mul_(high - low), x, low)


def _add_product(total: Tensor, x: Tensor, factor: Tensor) -> Tensor:
    """Adds ``factor * x`` to ``total`` in place."""
    if total.dtype == torch.bfloat16:  # addcmul_ is slow in bfloat16
        return total.add_(x * factor)
    return total.addcmul_(x, factor)
