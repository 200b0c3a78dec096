# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Sizes inside a graph: computed from the images, never numbers of the images it was traced on.

torch.export and torch.jit.trace see sizes differently, and both must find them open: the first
as symbols, which are kept opaque here, since conditions on a formula of the image's size could not
be decided; the second as tensors of no dimension.
"""

from typing import cast

import torch
from torch import Tensor
from torch.jit._trace import is_tracing


def size_of(images: Tensor) -> Tensor:
    """Returns (2,), int64: H and W of (N, H, W, C)."""
    if is_tracing():
        return torch._shape_as_tensor(images)[1:3]
    return torch.stack([torch.scalar_tensor(n, dtype=torch.int64) for n in images.shape[1:3]])


def as_length(length: Tensor, *, at_least: int = 1) -> int:
    """Turns a length that was computed, 0-d, into one that PyTorch's functions take.

    Args:
        length: int64, on the CPU or not.
        at_least: what it is known not to fall below.
    """
    if is_tracing():
        return cast(int, length)  # recorded, where a number would be kept for good
    number = length.item()
    torch._check(number >= at_least)
    return cast(int, number)


def ceil_to_multiple(length: Tensor, divisor: int) -> int:
    """Returns the least multiple of ``divisor`` that is not below a length, 0-d."""
    return divisor * as_length(_ceil_div(length, divisor))


def round_div(dividend: Tensor, divisor: Tensor) -> Tensor:
    """Divides whole numbers, to the nearest; halves go up."""
    return torch.div(2 * dividend + divisor, 2 * divisor, rounding_mode="floor")


def _ceil_div(dividend: Tensor, divisor: int) -> Tensor:
    return torch.div(dividend + (divisor - 1), divisor, rounding_mode="floor")
