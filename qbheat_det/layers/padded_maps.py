# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Padding masks, resizing and sine position encodings for batches of images of different sizes.

Padding is represented by a Boolean mask ``padding`` (N, 1, H, W), True outside the image, or None
if no image of the batch is padded. Images are at the top left of the batch. Therefore, the mask at
half the resolution consists of every second row and column.

Position encoding: "End-to-End Object Detection with Transformers", Carion et al., arXiv:2005.12872,
Sec. A.4.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def padding_mask(image_sizes: Tensor, size: Sequence[int]) -> Tensor:
    """Returns a mask (N, 1, H, W), True outside images of sizes (N, 2), for a batch of (H, W)."""
    height, width = size
    rows = torch.arange(height, device=image_sizes.device) >= image_sizes[:, :1]  # (N, H)
    columns = torch.arange(width, device=image_sizes.device) >= image_sizes[:, 1:]  # (N, W)
    return (rows[:, :, None] | columns[:, None, :])[:, None]


def halve(padding: Tensor | None) -> Tensor | None:
    """Returns the mask after a convolution with stride 2, whose output size is ceil(size / 2)."""
    return None if padding is None else padding[..., ::2, ::2]


def valid_sizes(padding: Tensor) -> Tensor:
    """Returns the height and width (N, 2) of the unpadded area of each mask."""
    valid = ~padding[:, 0]
    return torch.stack([valid[:, :, 0].sum(dim=1), valid[:, 0, :].sum(dim=1)], dim=1)


def zero_padding(x: Tensor, padding: Tensor | None) -> Tensor:
    """Sets a feature map (N, C, H, W) to 0 outside the images, like a convolution's padding."""
    # masked_fill would change the memory format of channels-last tensors.
    return x if padding is None else torch.where(padding, x.new_zeros(()), x)


def resize_bilinear(
    x: Tensor, size: Sequence[int], padding: Tensor | None, padding_out: Tensor | None
) -> Tensor:
    """Resizes ``x`` (N, C, H, W) to (N, C, H', W') bilinearly, as if no image was padded.

    ``padding`` (N, 1, H, W) is the mask of ``x``, and ``padding_out`` (N, 1, H', W') the mask of
    the result. They are None if no image is padded.
    """
    if padding is None or padding_out is None:
        return F.interpolate(x, size=tuple(size), mode="bilinear", align_corners=False)
    old = valid_sizes(padding).to(x.dtype)
    new = valid_sizes(padding_out).to(x.dtype)
    rows = _hats(_source_positions(size[0], old[:, 0], new[:, 0]), x.shape[2])  # (N, H', H)
    columns = _hats(_source_positions(size[1], old[:, 1], new[:, 1]), x.shape[3])  # (N, W', W)
    # Padding has weight 0, but is set to 0 because it may be infinite or NaN.
    pixels = zero_padding(x, padding).permute(0, 2, 3, 1)  # (N, H, W, C)
    pixels = (rows @ pixels.flatten(2)).unflatten(2, pixels.shape[2:])  # (N, H', W, C)
    return (columns[:, None] @ pixels).permute(0, 3, 1, 2)


def _source_positions(length: int, old: Tensor, new: Tensor) -> Tensor:
    """Returns the positions (N, length) of outputs in coordinates of inputs, 0 to old - 1."""
    centres = torch.arange(length, device=old.device, dtype=old.dtype) + 0.5
    position = centres * (old / new)[:, None] - 0.5
    return torch.minimum(position.clamp(min=0), (old - 1)[:, None])


def _hats(positions: Tensor, length: int) -> Tensor:
    """Returns the bilinear weight (N, P, length) of each input at positions (N, P)."""
    inputs = torch.arange(length, device=positions.device, dtype=positions.dtype)
    return (1 - (positions[..., None] - inputs).abs()).clamp(min=0)


class SinePositionEncoding(nn.Module):
    """Encodes the row in the first half of the channels and the column in the second half."""

    def __init__(self, *, channels: int) -> None:
        """Takes the number of channels C. Raises a ``ValueError`` if C is not divisible by 4."""
        super().__init__()
        if channels % 4:
            raise ValueError(f"a sine encoding needs channels divisible by 4, not {channels}")
        exponent = torch.arange(channels // 4) * (4 / channels)
        self.register_buffer("frequency", 2 * math.pi / 10000.0**exponent, persistent=False)
        self.frequency: Tensor  # (C / 4,)

    def forward(self, size: Sequence[int], padding: Tensor | None = None) -> Tensor:
        """Returns position encodings (N, HW, C) of maps (H, W) with ``padding`` (N, 1, H, W).

        Without padding, the encodings are (1, HW, C). Positions are normalized to (0, 1] within the
        unpadded image.
        """
        height, width = size
        if padding is None:
            heights, widths = (self.frequency.new_full((1,), length) for length in size)
        else:
            heights, widths = valid_sizes(padding).to(self.frequency.dtype).unbind(dim=1)
        rows = self._waves(height, heights)  # (N, H, C / 2)
        columns = self._waves(width, widths)  # (N, W, C / 2)
        code = torch.cat(
            [
                rows[:, :, None].expand(-1, -1, width, -1),
                columns[:, None].expand(-1, height, -1, -1),
            ],
            dim=-1,
        )
        return code.flatten(1, 2)

    def wave(self, position: Tensor) -> Tensor:
        """Encodes coordinates (...) in [0, 1] as (..., C / 2)."""
        phase = position[..., None] * self.frequency
        return torch.stack([phase.sin(), phase.cos()], dim=-1).flatten(-2)

    def _waves(self, length: int, counts: Tensor) -> Tensor:
        index = torch.arange(1, length + 1, device=counts.device, dtype=counts.dtype)
        return self.wave(index / (counts[:, None] + 1e-6))  # (N, length, C / 2)
