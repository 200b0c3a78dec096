# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Dynamic ReLU in fewer passes over the feature map.

With the slopes sorted, max(a1 x, a2 x) is low x + (high - low) relu(x). The plain formula stores
three feature maps for the backward pass. This one stores only x, and needs one buffer: on CPUs,
allocating a large tensor takes longer than the arithmetic.
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
        """See ``DynamicReLU.forward``."""
        theta = self.theta(token)
        if x.dtype != theta.dtype:  # autocast, in which only the linear layers are in bfloat16
            low, high = sort_slopes(theta)
            return torch.maximum(low * x, high * x)
        if torch.is_grad_enabled():
            return _TwoSlopes.apply(x, theta)
        return _bend(x, *sort_slopes(theta))


def sort_slopes(theta: Tensor) -> tuple[Tensor, Tensor]:
    """Takes theta (N, 2 C) in [0, 1]. Returns the smaller and larger slope, (N, C, 1, 1) each."""
    a1, a2 = to_slopes(theta)
    return torch.minimum(a1, a2), torch.maximum(a1, a2)


class _TwoSlopes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, theta: Tensor) -> Tensor:
        ctx.save_for_backward(x, theta)
        return _bend(x, *sort_slopes(theta))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, theta = ctx.saved_tensors
        low, high = sort_slopes(theta)
        above = torch.ops.aten.threshold_backward(gradient, x, 0)  # where x > 0
        of_high = (above * x).sum(dim=(2, 3))
        of_low = (gradient * x).sum(dim=(2, 3)) - of_high
        of_theta = torch.cat([of_high, of_low], dim=1)
        positive, negative = theta.chunk(2, dim=1)
        is_swapped = 2 * positive < 2 * negative - 1  # the first slope is the smaller
        if x.device.type != "cpu" or is_swapped.any():  # any() would synchronize with a GPU
            swapped = torch.cat([of_low, of_high], dim=1)
            of_theta = torch.where(torch.cat([is_swapped, is_swapped], dim=1), swapped, of_theta)
        of_x = _add_product(above.mul_(high - low), gradient, low)
        return of_x, 2 * of_theta


def _bend(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    return _add_product(F.relu(x).mul_(high - low), x, low)


def _add_product(total: Tensor, x: Tensor, factor: Tensor) -> Tensor:
    """Adds ``factor * x`` to ``total`` in place."""
    if total.dtype == torch.bfloat16:  # addcmul_ is slow in bfloat16
        return total.add_(x * factor)
    return total.addcmul_(x, factor)
