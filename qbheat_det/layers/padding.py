# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Batches of differently sized images: where a padded map holds no image.

One representation travels through the whole package: a Boolean map ``padding`` of shape
(N, 1, H, W), True outside the image, or None when no image of the batch is padded. Images sit at
the top left, so a map at half the resolution has every second entry of the mask.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F


def padding_mask(image_sizes: Tensor, size: Sequence[int]) -> Tensor:
    """Marks the positions of a padded batch that belong to no image.

    Args:
        image_sizes: (N, 2) heights and widths in pixels, before padding.
        size: (H, W) of the padded batch, in pixels.

    Returns:
        (N, 1, H, W) Boolean, True where there is no image.
    """
    height, width = size
    rows = torch.arange(height, device=image_sizes.device) >= image_sizes[:, :1]  # (N, H)
    columns = torch.arange(width, device=image_sizes.device) >= image_sizes[:, 1:]  # (N, W)
    return (rows[:, :, None] | columns[:, None, :])[:, None]


def halve(padding: Tensor | None) -> Tensor | None:
    """Returns the mask after a convolution of stride 2 that maps size s to ceil(s / 2)."""
    return None if padding is None else padding[..., ::2, ::2]


def valid_sizes(padding: Tensor) -> Tensor:
    """Returns (N, 2): height and width in map positions of the image under each mask."""
    valid = ~padding[:, 0]
    return torch.stack([valid[:, :, 0].sum(dim=1), valid[:, 0, :].sum(dim=1)], dim=1)


def zero_padding(x: Tensor, padding: Tensor | None) -> Tensor:
    """Zeroes a map (N, C, H, W) outside the images.

    A convolution then sees at an image's border what it would see if the image were alone.
    """
    # Not masked_fill, which turns channels-last maps round.
    return x if padding is None else torch.where(padding, x.new_zeros(()), x)


def resize_bilinear(
    x: Tensor,
    size: Sequence[int],
    padding: Tensor | None = None,
    padding_out: Tensor | None = None,
) -> Tensor:
    """Resizes maps bilinearly, each image of a padded batch from its own size to its own size.

    Args:
        x: (N, C, H, W).
        size: (H', W') of the result.
        padding: (N, 1, H, W) mask of ``x``, or None.
        padding_out: (N, 1, H', W') mask of the result; None exactly when ``padding`` is.

    Returns:
        (N, C, H', W'); inside each image the same as resizing it alone.
    """
    if padding is None or padding_out is None:
        return F.interpolate(x, size=tuple(size), mode="bilinear", align_corners=False)
    old, new = valid_sizes(padding).to(x.dtype), valid_sizes(padding_out).to(x.dtype)
    rows = _hats(_source_positions(size[0], old[:, 0], new[:, 0]), x.shape[2])  # (N, H', H)
    columns = _hats(_source_positions(size[1], old[:, 1], new[:, 1]), x.shape[3])  # (N, W', W)
    # A weight of exactly zero falls on the padding, which need not be finite.
    pixels = zero_padding(x, padding).permute(0, 2, 3, 1)  # (N, H, W, C)
    pixels = (rows @ pixels.flatten(2)).unflatten(2, pixels.shape[2:])  # (N, H', W, C)
    return (columns[:, None] @ pixels).permute(0, 3, 1, 2)


def _source_positions(length: int, old: Tensor, new: Tensor) -> Tensor:
    """Returns (N, length): where each of ``length`` outputs lies between the inputs 0 … old - 1."""
    centres = torch.arange(length, device=old.device, dtype=old.dtype) + 0.5
    position = centres * (old / new)[:, None] - 0.5
    return torch.minimum(position.clamp(min=0), (old - 1)[:, None])


def _hats(positions: Tensor, length: int) -> Tensor:
    """Returns (N, P, length): how much of each input is in the value at each position (N, P)."""
    inputs = torch.arange(length, device=positions.device, dtype=positions.dtype)
    return (1 - (positions[..., None] - inputs).abs()).clamp(min=0)
