# Copyright (c) qbheat_det contributors. Apache-2.0.
"""PyTorch's linear layers and dropout, faster on CPUs.

Dropout (Srivastava et al., JMLR 15, 2014): PyTorch draws a mask number by number on one core. Here
each word of a faster generator gives four 16-bit numbers; PyTorch's generator seeds it for each
mask, so that one seed still determines everything. Products with bytes are faster than with
Booleans.

Linear layers of many rows: PyTorch multiplies float32 matrices with MKL and convolves with oneDNN.
On an AMD EPYC with AVX-512 a matrix product reaches half the rate of a convolution. On processors
with AVX-512 that are not Intel's, such a layer is therefore computed as the equal 1x1 convolution:
rows of C numbers are a channels-last map, so nothing is copied. Elsewhere, and where an exporter or
tracer records the operations, it is PyTorch's own. Measurements: docs/performance.md.
"""

import functools
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.jit._trace import is_tracing
from torch.nn import functional as F

_STEPS = 1 << 16  # resolution of a rate
_MIN_ROWS = 64  # with fewer, a convolution is slower
_is_exporting = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)  # of 2.7


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


class Linear(nn.Linear):
    """``torch.nn.Linear`` through ``linear``."""

    def forward(self, input: Tensor) -> Tensor:
        """(..., C) to (..., C')."""
        return linear(input, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As ``torch.nn.functional.linear``.

    Args:
        x: (..., C).
        weight: (C', C).
        bias: (C',) or None.

    Returns:
        (..., C').
    """
    if not _uses_convolution(x, weight):
        return F.linear(x, weight, bias)
    image = x.reshape(1, -1, 1, x.shape[-1]).permute(0, 3, 1, 2)  # (1, C, rows, 1)
    y = F.conv2d(image, weight[:, :, None, None], bias)
    return y.permute(0, 2, 3, 1).reshape(*x.shape[:-1], len(weight))


def replace_linear_layers(module: nn.Module) -> None:
    """Replaces a library's ``nn.Linear`` children, at any depth, by ``Linear``.

    Parameters and their names stay.
    """
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
    return prefers_convolutions() and x.numel() >= _MIN_ROWS * x.shape[-1] > 0


@torch.compiler.assume_constant_result
def prefers_convolutions() -> bool:
    """Returns whether this machine convolves faster than it multiplies matrices."""
    return _look_up_processor()


@functools.cache
def _look_up_processor() -> bool:
    # Looked up rather than measured, so that every run on one machine computes the same.
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return False
    return torch.backends.cpu.get_cpu_capability() == "AVX512" and _vendor() not in ("", _INTEL)


_INTEL = "GenuineIntel"


def _vendor() -> str:
    """Returns the processor's vendor by Linux's name; "" on other systems."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    fields = (line.partition(":") for line in lines)
    return next((value.strip() for name, _, value in fields if name.strip() == "vendor_id"), "")
