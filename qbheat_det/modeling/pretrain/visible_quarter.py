# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Quarter masking: which block of each image stays visible.

Paper: QB-Heat, arXiv:2211.13228, Sec. 4.1 and Fig. 4. Not said there and chosen here: the four
corners are equally frequent within a batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

CORNERS = ("top_left", "top_right", "bottom_left", "bottom_right")
PLACES = (*CORNERS, "centre")
"""Where the visible quarter can be; a corner's index is twice its row plus its column."""
PLACES_OF = {"corner": CORNERS, "centre": ("centre",), "both": PLACES}
"""Where it can be for each kind of masking."""


@dataclass(frozen=True)
class VisibleQuarters:
    """Where the visible quarter of each image of a batch is.

    Images with the same place go side by side, in the order of ``PLACES``. How many there are of
    each is known to the host, so nothing that depends on the draw waits for the device. In batches
    of a multiple of 8 (of 4, where no quarter is central) it is the same in every draw: shapes are
    static, and what is compiled for them stays.
    """

    order: Tensor  # (N,), indices of the images
    counts: tuple[int, ...]  # images at each of PLACES

    @classmethod
    def draw(cls, num_images: int, *, visible: str, device: torch.device) -> "VisibleQuarters":
        """Draws from torch's global generators.

        Args:
            num_images: N.
            visible: "corner", "centre", or "both" for half of the images each. What a batch has
                too many for equal shares goes to random places.
            device: of ``order``.
        """
        half = (num_images + int(torch.randint(2, (), device="cpu"))) // 2
        at_corners = {"corner": num_images, "centre": 0, "both": half}[visible]
        counts = [at_corners // 4] * 4
        for corner in torch.randperm(4, device="cpu")[: at_corners % 4].tolist():
            counts[corner] += 1
        order = torch.randperm(num_images, device=device)
        return cls(order, (*counts, num_images - at_corners))

    @classmethod
    def at(cls, places: Sequence[str], *, device: torch.device) -> "VisibleQuarters":
        """Takes given places, one name of ``PLACES`` an image.

        Raises:
            ValueError: there is no place of that name.
        """
        if set(places) - set(PLACES):
            raise ValueError(f"the visible quarter is at one of {PLACES}, not all of {places}")
        indices = [PLACES.index(place) for place in places]
        order = sorted(range(len(indices)), key=indices.__getitem__)
        counts = tuple(indices.count(index) for index in range(len(PLACES)))
        return cls(torch.tensor(order, device=device), counts)

    def crop(self, images: Tensor) -> Tensor:
        """Returns the visible quarters (N, C, S / 2, S / 2) of ordered images (N, C, S, S)."""
        half = images.shape[-1] // 2
        corners = [(place // 2 * half, place % 2 * half) for place in range(4)]
        return torch.cat(
            [
                group[..., top : top + half, left : left + half]
                for group, (top, left) in zip(
                    images.split(self.counts), [*corners, (half // 2, half // 2)], strict=True
                )
            ]
        )

    def spread(self, values: Tensor) -> Tensor:
        """From one value for each of ``PLACES``, (5, ...), to one an ordered image, (N, ...)."""
        return torch.cat(
            [
                value.expand(count, *value.shape)
                for value, count in zip(values, self.counts, strict=True)
            ]
        )


def visible_positions(size: int) -> Tensor:
    """Returns (5, size, size): for each of ``PLACES``, True in the visible quarter."""
    first = torch.arange(size) < size // 2
    middle = (torch.arange(size) >= size // 4) & (torch.arange(size) < size - size // 4)
    rows = torch.stack([first, first, ~first, ~first, middle])
    columns = torch.stack([first, ~first, first, ~first, middle])
    return rows[:, :, None] & columns[:, None, :]
