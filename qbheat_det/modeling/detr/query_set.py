# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Queries that pass through MF-DETR's decoder beside its own, and what they attend to."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class QuerySet:
    """E further queries for each of N images, and what they may not attend to.

    ``content`` and ``position`` are (N, E, C). ``masked`` (N or 1, E, E) is True where a query
    (row) may not attend to another, ``reads_own`` (E,) where it attends to the decoder's own.
    """

    content: Tensor
    position: Tensor
    masked: Tensor
    reads_own: Tensor

    def mask(self, num_own: int) -> Tensor:
        """Returns (N, Q + E, Q + E), True where a query (row) may not attend to another.

        Args:
            num_own: Q, of the decoder's own queries, which come first and attend to none of these.
        """
        num_images, num_extra = self.content.shape[:2]
        own = torch.arange(num_own + num_extra, device=self.masked.device) >= num_own
        above = own.expand(num_images, num_own, -1)
        left = ~self.reads_own[:, None].expand(num_images, -1, num_own)
        below = torch.cat([left, self.masked.expand(num_images, -1, -1)], dim=2)
        return torch.cat([above, below], dim=1)


def join_queries(parts: Sequence[QuerySet]) -> QuerySet:
    """Joins sets of queries that do not attend to each other."""
    widths = [part.content.shape[1] for part in parts]
    num_images = len(parts[0].content)
    rows = [
        F.pad(
            part.masked.expand(num_images, -1, -1),
            (sum(widths[:index]), sum(widths[index + 1 :])),
            value=True,
        )
        for index, part in enumerate(parts)
    ]
    return QuerySet(
        content=torch.cat([part.content for part in parts], dim=1),
        position=torch.cat([part.position for part in parts], dim=1),
        masked=torch.cat(rows, dim=1),
        reads_own=torch.cat([part.reads_own for part in parts]),
    )


def sum_blocks(losses: Mapping[str, Tensor], *, kind: str, weight: float) -> dict[str, Tensor]:
    """Returns weighted sums over blocks, from "loss_ce" (L,) to "loss_<kind>_ce" ()."""
    return {
        name.replace("loss_", f"loss_{kind}_"): weight * loss.sum() for name, loss in losses.items()
    }
