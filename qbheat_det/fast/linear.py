# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Linear layers as 1x1 convolutions, on AVX-512 processors of other vendors than Intel.

There, MKL's matrix product is only half as fast as oneDNN's convolution (docs/performance.md).
"""

import functools

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qbheat_det.core.environment import read_cpu_field
from qbheat_det.layers import MapAttention

from .form import FastForm

_MIN_ROWS = 64  # with fewer rows, a convolution is slower


class ConvolvedLinear(FastForm, nn.Linear):
    """``torch.nn.Linear`` as a 1x1 convolution."""

    @classmethod
    def is_faster_for(cls, layer: nn.Module) -> bool:
        return prefers_convolutions()

    def forward(self, input: Tensor) -> Tensor:
        """Takes features (..., C) and returns features (..., C')."""
        return convolve_rows(input, self.weight, self.bias)


class ConvolvedMapAttention(FastForm, MapAttention):
    """``MapAttention`` whose projections are 1x1 convolutions."""

    @classmethod
    def is_faster_for(cls, layer: nn.Module) -> bool:
        return prefers_convolutions()

    def project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See ``MapAttention.project``."""
        assert self.in_proj_weight is not None, "keys and values are as wide as the queries"
        weights = self.in_proj_weight.chunk(3)
        biases = self.in_proj_bias.chunk(3)
        query = convolve_rows(query, weights[0], biases[0])
        key = convolve_rows(key, weights[1], biases[1])
        value = convolve_rows(value, weights[2], biases[2])
        return self.split_heads(query), self.split_heads(key), self.split_heads(value)


def convolve_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Computes ``torch.nn.functional.linear`` as a convolution if this is faster for ``x``.

    Takes features (..., C) and a weight (C', C). Returns features (..., C').
    """
    is_float = x.dtype == weight.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    # With one thread, PyTorch does not use oneDNN for 1x1 convolutions.
    is_fast = x.device.type == "cpu" and torch.get_num_threads() > 1
    has_rows = x.numel() >= _MIN_ROWS * x.shape[-1] > 0
    if not (is_float and is_fast and has_rows):
        return F.linear(x, weight, bias)
    image = x.reshape(1, -1, 1, x.shape[-1]).permute(0, 3, 1, 2)  # (1, C, rows, 1)
    y = F.conv2d(image, weight[:, :, None, None], bias)
    return y.permute(0, 2, 3, 1).reshape(*x.shape[:-1], len(weight))


@functools.cache
def prefers_convolutions() -> bool:
    """Whether 1x1 convolutions are faster than matrix products on this machine."""
    # The answer is looked up, not timed, so that all runs on one machine give the same results.
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return False
    is_intel_or_unknown = read_cpu_field("vendor_id") in ("", "GenuineIntel")
    return torch.backends.cpu.get_cpu_capability() == "AVX512" and not is_intel_or_unknown
