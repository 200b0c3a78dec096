# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Linear layers of many rows, by whichever of PyTorch's two CPU libraries multiplies faster.

PyTorch's products of matrices in float32 are those of MKL, its convolutions those of oneDNN. On an
AMD EPYC with AVX-512 a product reaches half of what a convolution does (docs/performance.md). On
processors with AVX-512 that are not Intel's, a linear layer of many rows is the 1x1 convolution
that it equals: rows of C numbers are a channels-last map, so nothing is copied.
Elsewhere, and where exporters read what is computed, it is PyTorch's own.
"""

import functools
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.jit._trace import is_tracing
from torch.nn import functional as F

_MANY = 64  # rows, from which on a convolution is not slower
_is_exporting = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)  # of 2.7


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
    if not _is_convolution(x, weight):
        return F.linear(x, weight, bias)
    image = x.reshape(1, -1, 1, x.shape[-1]).permute(0, 3, 1, 2)  # (1, C, rows, 1)
    found = F.conv2d(image, weight[:, :, None, None], bias)
    return found.permute(0, 2, 3, 1).reshape(*x.shape[:-1], len(weight))


def multiply_by_rows(module: nn.Module) -> None:
    """Has the linear layers of others' modules go through ``linear``, with their parameters."""
    for each in module.modules():
        if type(each) is nn.Linear:
            each.__class__ = Linear


def _is_convolution(x: Tensor, weight: Tensor) -> bool:
    if x.device.type != "cpu" or not x.dtype == weight.dtype == torch.float32:
        return False
    if is_tracing() or _is_exporting() or torch.is_autocast_enabled("cpu"):
        return False
    return prefers_convolutions() and x.numel() >= _MANY * x.shape[-1] > 0


@torch.compiler.assume_constant_result
def prefers_convolutions() -> bool:
    """Whether this machine's convolutions multiply faster than its products of matrices."""
    return _look_up()


@functools.cache
def _look_up() -> bool:
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return False
    return torch.backends.cpu.get_cpu_capability() == "AVX512" and _vendor() not in ("", _INTEL)


_INTEL = "GenuineIntel"


def _vendor() -> str:
    """Returns who made the processor, as Linux names it, or nothing.

    Looked up rather than measured, so that a run on one machine is the same every time.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    found = (line.partition(":") for line in lines)
    return next((value.strip() for name, _, value in found if name.strip() == "vendor_id"), "")
