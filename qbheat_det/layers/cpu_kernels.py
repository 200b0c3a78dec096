# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Dropout several times faster than PyTorch's on CPUs, and when not to use CPU kernels at all.

Paper: "Dropout", Srivastava et al., JMLR 15 (2014). PyTorch draws a mask number by number on one
core. Here each word of a faster generator gives four 16-bit numbers; PyTorch's generator seeds it
for each mask, so that one seed still determines everything. Products with bytes are faster than
with Booleans (docs/performance.md).
"""

import numpy as np
import torch
from torch import Tensor, nn
from torch.jit._trace import is_tracing

_STEPS = 1 << 16  # resolution of a rate


def is_recorded() -> bool:
    """Whether a compiler or an exporter records the operations, and needs plain formulas."""
    return torch.compiler.is_compiling() or is_tracing()


class Dropout(nn.Dropout):
    """``torch.nn.Dropout``; on a CPU, rate and scale are rounded to 16 bits."""

    def forward(self, input: Tensor) -> Tensor:
        """A tensor of any shape to one like it."""
        drops = self.training and 0 < self.p < 1 and not self.inplace
        if not drops or input.device.type != "cpu" or is_recorded():
            return super().forward(input)
        return input * draw_kept(input.shape, self.p) / (1 - rounded(self.p))


def draw_kept(shape: tuple[int, ...], rate: float) -> Tensor:
    """Returns ones and zeros (int8, on the CPU), zeros with the probability ``rounded(rate)``.

    Takes a seventh of the time of ``bernoulli_``.
    """
    count = torch.Size(shape).numel()
    generator = np.random.SFC64(int(torch.randint(1 << 62, (), device="cpu")))
    words = torch.from_numpy(generator.random_raw(-(-count // 4)).view(np.int16))
    limit = round(rounded(rate) * _STEPS) - _STEPS // 2
    return (words[:count] >= limit).view(torch.int8).view(shape)


def rounded(rate: float) -> float:
    """Returns the rate of dropout in 16 bits, less than 1."""
    return min(round(rate * _STEPS), _STEPS - 1) / _STEPS
