# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Dynamic ReLU driven by a token.

Paper: "Dynamic ReLU", Chen et al., arXiv:2003.10027 (variant B, two slopes per channel), in the
form that "Mobile-Former", arXiv:2108.05895, uses: slopes from the first global token in place of
a pooled map, no intercepts.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from .recording import is_recorded


class DynamicReLU(nn.Module):
    """D(u) = max(a1 u, a2 u) per channel, with a1 in [0, 2] and a2 in [-1, 1] from a token."""

    def __init__(self, *, token_dim: int, channels: int) -> None:
        """
        Args:
            token_dim: width D of the driving token.
            channels: C of the maps.
        """
        super().__init__()
        self.squeeze = nn.Linear(token_dim, token_dim // 4)
        self.slopes = nn.Linear(token_dim // 4, 2 * channels)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Near-zero weights: slopes 1 and 0, a plain ReLU."""
        for layer in (self.squeeze, self.slopes):
            nn.init.normal_(layer.weight, std=0.01)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor, token: Tensor) -> Tensor:
        """
        Args:
            x: (N, C, H, W).
            token: (N, D).

        Returns:
            (N, C, H, W).
        """
        # max(a1 u, a2 u) = lo u + (hi - lo) relu(u): one branch to keep for the backward, not two.
        low, high = self.bounds(token)
        if is_recorded() or x.dtype != low.dtype:
            return low * x + (high - low) * F.relu(x)  # a compiler makes one pass of it
        if torch.is_grad_enabled():
            found: Tensor = _TwoSlopes.apply(x, low, high)
            return found
        return _two_slopes(x, low, high)

    def bounds(self, token: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the smaller and the larger slope of each channel, (N, C, 1, 1), of (N, D)."""
        theta = F.hardsigmoid(self.slopes(F.relu(self.squeeze(token))))[:, :, None, None]
        positive, negative = theta.chunk(2, dim=1)
        a1, a2 = 2 * positive, 2 * negative - 1
        return torch.minimum(a1, a2), torch.maximum(a1, a2)


class _TwoSlopes(torch.autograd.Function):
    """low x + (high - low) relu(x), which keeps x alone and goes over the maps seldom."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, low: Tensor, high: Tensor) -> Tensor:
        ctx.save_for_backward(x, low, high)
        return _two_slopes(x, low, high)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, low, high = ctx.saved_tensors
        above = torch.ops.aten.threshold_backward(gradient, x, 0)  # where x > 0
        of_all = (gradient * x).sum(dim=(2, 3), keepdim=True)
        of_high = (above * x).sum(dim=(2, 3), keepdim=True)
        return above.mul_(high - low).addcmul_(gradient, low), of_all - of_high, of_high


def _two_slopes(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    # In one buffer: on a CPU fresh memory for a large map costs more than the arithmetic.
    return F.relu(x).mul_(high - low).addcmul_(x, low)
