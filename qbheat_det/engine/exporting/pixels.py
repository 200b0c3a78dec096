# Copyright (c) qbheat_det contributors. Apache-2.0.
"""From bytes to what a network reads, inside the graph: resize or crop, normalise, pad.

Detectron2 resizes with Pillow, whose bilinear filter is antialiased and computes in fixed point. No
format has an operator that gives its bytes; products with matrices of its weights do.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .graph_sizes import as_length, ceil_to_multiple, round_div, size_of

_HALF = 2.0**11
"""Pillow's weights are whole numbers over the square of this."""


class ShortestEdge(nn.Module):
    """Detectron2's ``ResizeShortestEdge`` with one length, as its ``DefaultPredictor`` applies it.

    Sizes are computed in whole numbers; Detectron2's, in floating point, are the same but where
    a side is a half to within rounding.
    """

    def __init__(self, *, min_size: int, max_size: int) -> None:
        """
        Args:
            min_size: of the shorter side, in pixels; 0 leaves images as they are.
            max_size: that the longer side may have, in pixels.
        """
        super().__init__()
        self.min_size = min_size
        self.max_size = max_size

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """
        Args:
            images: (N, H, W, 3), uint8.

        Returns:
            (N, 3, H', W'), float32, whole numbers; and (4,), int64: H, W, H', W'.
        """
        size = size_of(images)
        planes = images.permute(0, 3, 1, 2).float()
        if not self.min_size:
            return planes, torch.cat([size, size])
        resized = torch.minimum(
            round_div(size * self.min_size, size.min()), round_div(size * self.max_size, size.max())
        ).clamp(min=1)
        return resize_as_pillow(planes, *_lengths(resized)), torch.cat([size, resized])


class CentreSquare(nn.Module):
    """The square in the middle, resized: what classifiers see of an image in inference."""

    def __init__(self, *, size: int, share: float) -> None:
        """
        Args:
            size: S, of the result, in pixels.
            share: side of the square relative to the image's shorter side.
        """
        super().__init__()
        self.size = size
        self.share = share

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """As ``ShortestEdge.forward``, to (N, 3, S, S)."""
        size = size_of(images)
        # To even where it is a half, as Python's.
        side = (size.min().double() * self.share).round().long().clamp(min=1)
        start = torch.div(size - side, 2, rounding_mode="floor")
        length = as_length(side)
        # By index: the two formats do not agree on slices whose ends are computed.
        steps = torch.arange(length, device=images.device)
        planes = images.index_select(1, start[0] + steps).index_select(2, start[1] + steps)
        resized = resize_as_pillow(planes.permute(0, 3, 1, 2).float(), self.size, self.size)
        return resized, torch.cat([size, torch.full_like(size, self.size)])


def resize_as_pillow(planes: Tensor, height: int, width: int) -> Tensor:
    """Resizes (N, C, H, W) of whole numbers in [0, 255] to (N, C, height, width), the same.

    Bilinear and antialiased, first along the rows, then the columns, with rounding after each.
    """
    high, low = _weights(planes.shape[3], width, planes)
    planes = _round(planes @ high.transpose(0, 1), planes @ low.transpose(0, 1))
    high, low = _weights(planes.shape[2], height, planes)
    return _round(high @ planes, low @ planes)


def _weights(length: int, resized: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Returns Pillow's weights of the old pixels in each new one, (resized, length), in two parts.

    They are whole numbers of 22 bits; the upper 11 and the lower 11.
    """
    pixel = torch.arange(length, dtype=torch.float64, device=like.device) + 0.5
    new = torch.arange(resized, dtype=torch.float64, device=like.device) + 0.5
    # As tensors: what is a number here would be the example's for good.
    scale = torch.true_divide(*(torch.full_like(pixel[:1], n) for n in (length, resized)))
    distance = (pixel - new[:, None] * scale).abs() / scale.clamp(min=1)
    weights = (1 - distance).clamp(min=0)
    weights = weights / weights.sum(dim=1, keepdim=True)
    weights = (weights * _HALF**2 + 0.5).floor()
    high = (weights / _HALF).floor()
    return high.to(like.dtype), (weights - high * _HALF).to(like.dtype)


def _round(high: Tensor, low: Tensor) -> Tensor:
    """Returns (2048 high + low) / 2048 ** 2 to the nearest whole number, halves up.

    No number on the way has more bits than float32 holds.
    """
    return ((high + (low / _HALF).floor() + _HALF / 2) / _HALF).floor()


class Normalisation(nn.Module):
    """Subtracts the mean, divides by the deviation, and pads with zeros right and below."""

    def __init__(
        self, *, mean: Sequence[float], std: Sequence[float], size_divisibility: int = 0
    ) -> None:
        """
        Args:
            mean: of the channels, in the order of the images' channels.
            std: standard deviations, as ``mean``.
            size_divisibility: of which height and width become multiples; 0 for any size.
        """
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1))
        self.mean: Tensor
        self.std: Tensor
        self.divisor = size_divisibility if size_divisibility > 1 else 0

    def forward(self, planes: Tensor, sizes: Tensor) -> Tensor:
        """
        Args:
            planes: (N, 3, H', W').
            sizes: (4,), of which the last two are H' and W'.

        Returns:
            (N, 3, H'', W''), padded.
        """
        x = (planes - self.mean) / self.std
        if not self.divisor:
            return x
        tall, wide = (ceil_to_multiple(length, self.divisor) for length in sizes[2:].unbind())
        return F.pad(x, (0, wide - x.shape[3], 0, tall - x.shape[2]))


def _lengths(sizes: Tensor) -> list[int]:
    return [as_length(length) for length in sizes.unbind()]
