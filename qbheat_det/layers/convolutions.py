# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Detectron2's convolutions with fewer passes over wide maps, forward and backward.

Sources: "Batch Normalization", arXiv:1502.03167, whose scale and shift, once frozen, belong to the
convolution before it; "Mobile-Former", arXiv:2108.05895, whose blocks expand with depthwise
convolutions that give k channels for one. The latter are slow in oneDNN's backward pass on CPUs,
and those of one channel for one are not: gradients of the first output of each channel are taken,
then of the second, and so on. Both equal Detectron2's up to rounding, with its parameters' names.
"""

from typing import Any

import torch
from detectron2.layers import Conv2d, FrozenBatchNorm2d
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from .recording import is_recorded

_LARGE = 1 << 17  # numbers of a map, from which on turns take less time than they cost


class NormedConv2d(Conv2d):
    """Detectron2's convolution and norm, without activation; a frozen BatchNorm costs no pass."""

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) to (N, C', H', W')."""
        if is_recorded() or self.activation is not None:
            found: Tensor = super().forward(x)  # and exporters fold by themselves
            return found
        if type(self.norm) is FrozenBatchNorm2d and not _is_watched(self.norm):
            return self.convolve(x, *self._folded(self.norm))
        y = self.convolve(x, self.weight, self.bias)
        return y if self.norm is None else self.norm(y)

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The convolution alone, with weights and biases as they are given."""
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
    """One input channel an output: outputs c k to c k + k - 1 are of channel c."""

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """As the base class; gradients go by turns where k > 1."""
        if not self._goes_by_turns(x, weight, bias):
            return super().convolve(x, weight, bias)
        found: Tensor = _ByTurns.apply(x, weight, bias, self.padding)
        return found

    def _goes_by_turns(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
        if not torch.is_grad_enabled() or x.device.type != "cpu" or x.numel() < _LARGE:
            return False
        # In half precision sums in parts are rounded more often.
        if x.dtype != weight.dtype or x.dtype not in (torch.float32, torch.float64):
            return False
        if torch.is_autocast_enabled("cpu") or (bias is not None and bias.requires_grad):
            return False
        # With a stride the copies would be as large as what they save.
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
    """Whether hooks of its own want to see what passes a module, forward or backward."""
    forward = module._forward_hooks or module._forward_pre_hooks
    return bool(forward or module._backward_hooks or module._backward_pre_hooks)
