# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Convolutions and dynamic ReLU with fewer passes over wide maps, forward and backward.

A frozen BatchNorm's scale and shift are folded into the convolution before it. Mobile-Former
(arXiv:2108.05895) expands with depthwise convolutions that give k channels for one. oneDNN's
backward pass of these is slow on CPUs, but fast for k = 1: gradients are computed for the first
output of each channel, then for the second, and so on. The results are Detectron2's up to rounding,
with its parameters' names.

Dynamic ReLU: Chen et al., arXiv:2003.10027 (variant B, two slopes for each channel), in the form of
Mobile-Former: slopes from the first global token in place of a pooled map, no intercepts.
"""

from typing import Any

import torch
from detectron2.layers import Conv2d, FrozenBatchNorm2d
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from .cpu_kernels import is_recorded

_LARGE = 1 << 17  # least numbers of a map for which turns are faster


class NormedConv2d(Conv2d):
    """Detectron2's convolution and norm; a frozen BatchNorm takes no pass over the map."""

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) to (N, C', H', W')."""
        if is_recorded() or self.activation is not None:
            found: Tensor = super().forward(x)  # compilers and exporters fold by themselves
            return found
        if type(self.norm) is FrozenBatchNorm2d and not _is_watched(self.norm):
            return self.convolve(x, *self._folded(self.norm))
        y = self.convolve(x, self.weight, self.bias)
        return y if self.norm is None else self.norm(y)

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The convolution alone, with the given weight and bias."""
        placed = self.stride, self.padding, self.dilation
        return F.conv2d(x, weight, bias, *placed, self.groups)

    def _folded(self, norm: FrozenBatchNorm2d) -> tuple[Tensor, Tensor]:
        scale = norm.weight * (norm.running_var + norm.eps).rsqrt()
        shift = norm.bias - norm.running_mean * scale
        if self.bias is not None:
            shift = shift + self.bias * scale
        dtype = self.weight.dtype  # weights in half precision may have a norm in full
        return (self.weight * scale[:, None, None, None]).to(dtype), shift.to(dtype)


class DepthwiseConv2d(NormedConv2d):
    """One input channel for each output: outputs c k to c k + k - 1 are of channel c."""

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """As the base class; gradients are computed in k turns."""
        if not self._goes_by_turns(x, weight, bias):
            return super().convolve(x, weight, bias)
        found: Tensor = _ByTurns.apply(x, weight, bias, self.padding)
        return found

    def _goes_by_turns(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
        if not torch.is_grad_enabled() or x.device.type != "cpu" or x.numel() < _LARGE:
            return False
        # In half precision, sums of turns would be rounded more often.
        if x.dtype != weight.dtype or x.dtype not in (torch.float32, torch.float64):
            return False
        if torch.is_autocast_enabled("cpu") or (bias is not None and bias.requires_grad):
            return False
        # With a stride, the copies would cost as much as the turns save.
        plain = self.stride == self.dilation == (1, 1) and not isinstance(self.padding, str)
        return x.dim() == 4 and plain and self.out_channels > self.in_channels == self.groups


class _ByTurns(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, padding: tuple[int, int]
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.padding = padding
        return F.conv2d(x, weight, bias, padding=padding, groups=x.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:2]
        layout = torch.contiguous_format if x.is_contiguous() else torch.channels_last
        turns = len(weight) // x.shape[1]
        of_x, of_weight = None, torch.empty_like(weight) if wanted[1] else None
        for turn in range(turns):
            part, part_of_weight, _ = torch.ops.aten.convolution_backward(
                gradient[:, turn::turns].contiguous(memory_format=layout),
                x,
                weight[turn::turns],
                None,
                [1, 1],
                ctx.padding,
                [1, 1],
                False,
                [0, 0],
                x.shape[1],
                [*wanted, False],
            )
            if wanted[0]:
                of_x = part if of_x is None else of_x.add_(part)
            if of_weight is not None:
                of_weight[turn::turns] = part_of_weight
        return of_x, of_weight, None, None


def _is_watched(module: nn.Module) -> bool:
    """Whether a module has hooks of its own, forward or backward."""
    forward = module._forward_hooks or module._forward_pre_hooks
    return bool(forward or module._backward_hooks or module._backward_pre_hooks)


class DynamicReLU(nn.Module):
    """D(u) = max(a1 u, a2 u) per channel, with a1 in [0, 2] and a2 in [-1, 1] from a token."""

    def __init__(self, *, token_dim: int, channels: int) -> None:
        super().__init__()
        self.squeeze = nn.Linear(token_dim, token_dim // 4)
        self.slopes = nn.Linear(token_dim // 4, 2 * channels)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialises weights near zero: slopes 1 and 0, a plain ReLU."""
        for layer in (self.squeeze, self.slopes):
            nn.init.normal_(layer.weight, std=0.01)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor, token: Tensor) -> Tensor:
        """(N, C, H, W) and a token (N, D) to (N, C, H, W)."""
        # max(a1 u, a2 u) = lo u + (hi - lo) relu(u), which keeps one map for the backward, not two.
        low, high = self.bounds(token)
        if is_recorded() or x.dtype != low.dtype:
            return low * x + (high - low) * F.relu(x)  # compilers fuse it
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
    """low x + (high - low) relu(x), which keeps x alone, with few passes over the maps."""

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
    # In one buffer: on a CPU, allocating a large map costs more than the arithmetic.
    return F.relu(x).mul_(high - low).addcmul_(x, low)
