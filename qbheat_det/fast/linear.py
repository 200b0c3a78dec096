# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Linear layers as 1x1 convolutions, on processors with AVX-512 that are not from Intel.

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
        """Projects queries (N, Q, C), keys (N, L, C) and values (N, L, C), and splits the heads."""
        # PyTorch sets it to None only if keys or values are not as wide as the queries.
        assert self.in_proj_weight is not None
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
    channels = x.shape[-1]
    is_float32 = x.dtype == torch.float32 and weight.dtype == torch.float32
    is_autocast = torch.is_autocast_enabled("cpu")
    # With one thread, PyTorch does not use oneDNN for 1x1 convolutions.
    uses_onednn = x.device.type == "cpu" and torch.get_num_threads() > 1
    has_enough_rows = channels > 0 and x.numel() >= _MIN_ROWS * channels
    if is_autocast or not (is_float32 and uses_onednn and has_enough_rows):
        return F.linear(x, weight, bias)
    image = x.reshape(1, -1, 1, channels).permute(0, 3, 1, 2)  # (1, C, rows, 1)
    y = F.conv2d(image, weight[:, :, None, None], bias)  # (1, C', rows, 1)
    return y.permute(0, 2, 3, 1).reshape(*x.shape[:-1], len(weight))


@functools.cache
def prefers_convolutions() -> bool:
    """Returns whether 1x1 convolutions are faster than matrix products on this machine.

    The answer depends on the type of the processor. It is not measured, so that all runs on one
    machine give the same results.
    """
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return False
    has_avx512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
    is_intel_or_unknown = read_cpu_field("vendor_id") in ("", "GenuineIntel")
    return has_avx512 and not is_intel_or_unknown
