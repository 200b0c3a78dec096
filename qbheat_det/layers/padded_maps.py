# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Padding masks, resizing and sine position encodings for batches of images of different sizes.

Padding is represented by a Boolean mask ``padding`` (N, 1, H, W), True outside the image. It is
None if no image of the batch is padded. Images are at the top left of the batch. Therefore, the
mask at half the resolution consists of every second row and column.

Position encoding: "End-to-End Object Detection with Transformers", Carion et al., arXiv:2005.12872,
Sec. A.4.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def padding_mask(image_sizes: Tensor, size: Sequence[int]) -> Tensor:
    """Returns a mask (N, 1, H, W), True outside the images.

    ``image_sizes`` (N, 2) are the heights and widths of the images. ``size`` is the height and
    width (H, W) of the padded batch.
    """
    height, width = size
    heights = image_sizes[:, :1]  # (N, 1)
    widths = image_sizes[:, 1:]  # (N, 1)
    is_below = torch.arange(height, device=image_sizes.device) >= heights  # (N, H)
    is_right = torch.arange(width, device=image_sizes.device) >= widths  # (N, W)
    outside = is_below[:, :, None] | is_right[:, None, :]  # (N, H, W)
    return outside[:, None]


def halve(padding: Tensor | None) -> Tensor | None:
    """Returns the mask after a convolution with stride 2, whose output size is ceil(size / 2)."""
    if padding is None:
        return None
    return padding[..., ::2, ::2]


def valid_sizes(padding: Tensor) -> Tensor:
    """Returns the height and width (N, 2) of the unpadded area of each mask."""
    valid = ~padding[:, 0]  # (N, H, W)
    # Each image begins at the top left, so the first column and row have its full height and width.
    heights = valid[:, :, 0].sum(dim=1)
    widths = valid[:, 0, :].sum(dim=1)
    return torch.stack([heights, widths], dim=1)


def zero_padding(x: Tensor, padding: Tensor | None) -> Tensor:
    """Sets a feature map (N, C, H, W) to 0 outside the images, like a convolution's padding."""
    if padding is None:
        return x
    # masked_fill would change the memory format of channels-last tensors.
    return torch.where(padding, x.new_zeros(()), x)


def resize_bilinear(
    x: Tensor, size: Sequence[int], padding: Tensor | None, padding_out: Tensor | None
) -> Tensor:
    """Resizes ``x`` (N, C, H, W) to ``size`` (H', W') bilinearly, as if no image was padded.

    The unpadded area of each image is resized to its unpadded area in the result. ``padding``
    (N, 1, H, W) is the mask of ``x``, and ``padding_out`` (N, 1, H', W') the mask of the result.
    Both are None if no image is padded.
    """
    if padding is None or padding_out is None:
        return F.interpolate(x, size=tuple(size), mode="bilinear", align_corners=False)
    height, width = size
    old_heights, old_widths = valid_sizes(padding).to(x.dtype).unbind(dim=1)  # (N,) each
    new_heights, new_widths = valid_sizes(padding_out).to(x.dtype).unbind(dim=1)
    source_rows = _source_positions(height, old_heights, new_heights)  # (N, H')
    source_columns = _source_positions(width, old_widths, new_widths)  # (N, W')
    row_weights = _bilinear_weights(source_rows, x.shape[2])  # (N, H', H)
    column_weights = _bilinear_weights(source_columns, x.shape[3])  # (N, W', W)
    # Padding has weight 0, but is set to 0 because it may be infinite or NaN.
    pixels = zero_padding(x, padding).permute(0, 2, 3, 1)  # (N, H, W, C)
    resized_rows = row_weights @ pixels.flatten(2)  # (N, H', W * C)
    pixels = resized_rows.unflatten(2, pixels.shape[2:])  # (N, H', W, C)
    resized = column_weights[:, None] @ pixels  # (N, H', W', C)
    return resized.permute(0, 3, 1, 2)


def _source_positions(length: int, old: Tensor, new: Tensor) -> Tensor:
    """Returns the position in the input of each of ``length`` output pixels, (N, length).

    ``old`` (N,) and ``new`` (N,) are the unpadded lengths of input and output. Positions are in
    pixels of the input, from 0 to old - 1.
    """
    centres = torch.arange(length, device=old.device, dtype=old.dtype) + 0.5
    position = centres * (old / new)[:, None] - 0.5
    return torch.minimum(position.clamp(min=0), (old - 1)[:, None])


def _bilinear_weights(positions: Tensor, length: int) -> Tensor:
    """Returns the weight of each of ``length`` input pixels at positions (N, P), (N, P, length)."""
    inputs = torch.arange(length, device=positions.device, dtype=positions.dtype)
    distances = (positions[..., None] - inputs).abs()
    return (1 - distances).clamp(min=0)


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
        """Returns the position encodings (N, HW, C) of feature maps of ``size`` (H, W).

        ``padding`` (N, 1, H, W) is the padding mask. Without it, the encodings are (1, HW, C).
        Positions are normalized to (0, 1] within the unpadded image.
        """
        height, width = size
        if padding is None:
            heights = self.frequency.new_full((1,), height)
            widths = self.frequency.new_full((1,), width)
        else:
            heights, widths = valid_sizes(padding).to(self.frequency.dtype).unbind(dim=1)
        rows = self._encode_axis(height, heights)  # (N, H, C / 2)
        columns = self._encode_axis(width, widths)  # (N, W, C / 2)
        code = torch.cat(
            [
                rows[:, :, None].expand(-1, -1, width, -1),
                columns[:, None].expand(-1, height, -1, -1),
            ],
            dim=-1,
        )  # (N, H, W, C)
        return code.flatten(1, 2)

    def wave(self, position: Tensor) -> Tensor:
        """Encodes coordinates (...) in [0, 1] as (..., C / 2)."""
        phase = position[..., None] * self.frequency
        return torch.stack([phase.sin(), phase.cos()], dim=-1).flatten(-2)

    def _encode_axis(self, length: int, unpadded: Tensor) -> Tensor:
        """Encodes the positions along one axis, (N, length, C / 2).

        ``unpadded`` (N,) are the lengths of the unpadded images.
        """
        index = torch.arange(1, length + 1, device=unpadded.device, dtype=unpadded.dtype)
        return self.wave(index / (unpadded[:, None] + 1e-6))
