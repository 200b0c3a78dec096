# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Two areas of each image: two of its four quarters.

The first is what QB-Heat (arXiv:2211.13228) leaves visible in a corner, the second one of those
that it hides. The centre overlaps with all four, and would be told from its pixels: it takes no
part.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class AreaPairs:
    """Which two quarters of each image are seen, as indices into ``CORNERS``."""

    first: Tensor  # (N,)
    second: Tensor  # (N,), another one

    @classmethod
    def draw(cls, num_images: int, *, device: torch.device) -> "AreaPairs":
        """Draws from torch's global generator of the device, without waiting for it.

        Each corner comes first in as many images as any other, or in one more, and the second is
        any of the rest with the same chance.
        """
        turns = torch.randperm(num_images, device=device) + torch.randint(4, (), device=device)
        first = turns % 4
        further = torch.randint(1, 4, (num_images,), device=device)
        return cls(first, (first + further) % 4)

    def crop(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """From images (N, C, S, S) to the first and the second areas, each (N, C, S / 2, S / 2)."""
        half = images.shape[-1] // 2
        rows = images.unflatten(-1, (2, half)).unflatten(-3, (2, half))  # (N, C, 2, h, 2, h)
        quarters = rows.permute(0, 2, 4, 1, 3, 5).flatten(1, 2)  # (N, 4, C, h, h)
        each = torch.arange(len(images), device=images.device)
        return quarters[each, self.first], quarters[each, self.second]
