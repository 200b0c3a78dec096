# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Depthwise convolutions whose gradients go by turns where one channel gives several.

The blocks of "Mobile-Former", arXiv:2108.05895, expand with depthwise convolutions that give k
channels for one. oneDNN has fast kernels on CPUs for one channel in, one out, in the backward pass
above all. So the gradients of the first output of each channel are taken, then of the second, and
so on: the same sums, in up to k parts.
"""

from typing import Any

import torch
from detectron2.layers import Conv2d
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from .recording import is_recorded


class DepthwiseConv2d(Conv2d):
    """Detectron2's convolution, with an input channel an output, and without activation."""

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) to (N, k C, H', W'); output channels c k to c k + k - 1 are of channel c."""
        if not self._goes_by_turns(x):
            found: Tensor = super().forward(x)
            return found
        y: Tensor = _ByTurns.apply(x, self.weight, self.padding)
        return y if self.norm is None else self.norm(y)

    def _goes_by_turns(self, x: Tensor) -> bool:
        if not torch.is_grad_enabled() or x.device.type != "cpu" or is_recorded():
            return False
        if x.dtype != self.weight.dtype or torch.is_autocast_enabled("cpu"):
            return False
        # With a stride the copies that this needs are as large as what it saves.
        alone = self.bias is None and self.activation is None and self.stride == (1, 1)
        return alone and self.out_channels > self.in_channels and x.numel() > 0


class _ByTurns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, padding: tuple[int, int]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.padding = padding
        return F.conv2d(x, weight, padding=padding, groups=x.shape[1])

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
        return of_x, of_weight, None
