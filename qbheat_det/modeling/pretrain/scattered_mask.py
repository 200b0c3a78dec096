# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Scattered masking: which positions of each image stay visible, at random over the image.

Paper: "Masked Autoencoders Are Scalable Vision Learners" (MAE), arXiv:2111.06377, whose ratio of
three quarters it has, and which is QB-Heat's too.
"""

import zlib
from collections.abc import Iterable

import torch
from torch import Tensor


class RandomMask:
    """Draws masks with the same number of visible positions, K of G x G, in each image."""

    def __init__(self, *, grid_size: int, mask_ratio: float = 0.75) -> None:
        """
        Args:
            grid_size: G.
            mask_ratio: share of the positions that are hidden, rounded to whole ones.

        Raises:
            ValueError: nothing would be visible, or nothing hidden.
        """
        positions = grid_size**2
        num_visible = round((1 - mask_ratio) * positions) if 0 < mask_ratio < 1 else 0
        if not 0 < num_visible < positions:
            raise ValueError(
                f"MODEL.RANDOM_MASKING.MASK_RATIO {mask_ratio} of the {grid_size} x {grid_size} "
                "positions must leave at least one visible and hide at least one"
            )
        self.grid_size = grid_size
        self.num_visible = num_visible

    def draw(self, num_images: int, *, device: torch.device) -> Tensor:
        """Draws from the device's global generator: (N, G, G), True where visible."""
        return self._choose(torch.rand(num_images, self.grid_size**2, device=device))

    def of_images(self, names: Iterable[str], *, device: torch.device) -> Tensor:
        """Returns for each image the mask that follows from its name, the same in any batch."""
        noise = [
            torch.rand(
                self.grid_size**2,
                generator=torch.Generator().manual_seed(zlib.crc32(name.encode())),
            )
            for name in names
        ]
        return self._choose(torch.stack(noise).to(device))

    def _choose(self, noise: Tensor) -> Tensor:
        """From (N, G * G) to the K smallest of each row."""
        chosen = noise.argsort(dim=1)[:, : self.num_visible]
        visible = torch.zeros_like(noise, dtype=torch.bool).scatter_(1, chosen, True)
        return visible.unflatten(1, (self.grid_size, self.grid_size))
