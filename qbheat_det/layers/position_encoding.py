# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Fixed sine codes of map positions.

Paper: "End-to-End Object Detection with Transformers", Carion et al., arXiv:2005.12872, Sec. A.4.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .padding import valid_sizes


class SinePositionEncoding(nn.Module):
    """Half of the channels code the row, half the column, each relative to the image's own size."""

    def __init__(self, *, channels: int, temperature: float = 10000.0) -> None:
        """
        Args:
            channels: C of the code, divisible by 4.
            temperature: ratio of the longest to the shortest wave length.

        Raises:
            ValueError: ``channels`` is not divisible by 4.
        """
        super().__init__()
        if channels % 4:
            raise ValueError(f"a sine code needs channels divisible by 4, not {channels}")
        exponent = torch.arange(channels // 4) * (4 / channels)
        self.register_buffer("frequency", 2 * math.pi / temperature**exponent, persistent=False)
        self.frequency: Tensor  # (C / 4,)

    def forward(self, size: Sequence[int], padding: Tensor | None = None) -> Tensor:
        """
        Args:
            size: (H, W) of the map.
            padding: (N, 1, H, W), True where the map holds no image.

        Returns:
            (N, HW, C); (1, HW, C) without padding. Positions are normalised to (0, 1] within the
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
        """Returns (..., C / 2), the code of single coordinates (...) in [0, 1]."""
        phase = position[..., None] * self.frequency
        return torch.stack([phase.sin(), phase.cos()], dim=-1).flatten(-2)

    def _waves(self, length: int, counts: Tensor) -> Tensor:
        index = torch.arange(1, length + 1, device=counts.device, dtype=counts.dtype)
        return self.wave(index / (counts[:, None] + 1e-6))  # (N, length, C / 2)
