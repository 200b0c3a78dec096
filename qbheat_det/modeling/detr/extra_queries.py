# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Queries that go through MF-DETR's decoder beside its own, in training only.

They look at the map and are refined by the same weights, but nothing of the decoder's own reads
them: neither the object queries, nor the map.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class ExtraQueries:
    """E further queries of each of N images, and what they do not see.

    ``content`` and ``position`` are (N, E, C). ``hidden`` (N or 1, E, E) is True where one of them
    (row) does not see another, ``sees_own`` (E,) where one sees the decoder's own queries.
    """

    content: Tensor
    position: Tensor
    hidden: Tensor
    sees_own: Tensor

    def mask(self, num_own: int) -> Tensor:
        """Returns (N, Q + E, Q + E), True where a query (row) does not see another.

        Args:
            num_own: Q, of the decoder's own queries, which come first and see none of these.
        """
        num_images, num_extra = self.content.shape[:2]
        own = torch.arange(num_own + num_extra, device=self.hidden.device) >= num_own
        above = own.expand(num_images, num_own, -1)
        left = ~self.sees_own[:, None].expand(num_images, -1, num_own)
        below = torch.cat([left, self.hidden.expand(num_images, -1, -1)], dim=2)
        return torch.cat([above, below], dim=1)


def join_queries(parts: Sequence[ExtraQueries]) -> ExtraQueries:
    """Puts further queries behind each other; none sees those of another part."""
    before = [sum(part.content.shape[1] for part in parts[:index]) for index in range(len(parts))]
    total = sum(part.content.shape[1] for part in parts)
    num_images = len(parts[0].content)
    rows = [
        F.pad(
            part.hidden.expand(num_images, -1, -1),
            (start, total - start - part.content.shape[1]),
            value=True,
        )
        for part, start in zip(parts, before, strict=True)
    ]
    return ExtraQueries(
        content=torch.cat([part.content for part in parts], dim=1),
        position=torch.cat([part.position for part in parts], dim=1),
        hidden=torch.cat(rows, dim=1),
        sees_own=torch.cat([part.sees_own for part in parts]),
    )


def sum_blocks(losses: Mapping[str, Tensor], *, kind: str, weight: float) -> dict[str, Tensor]:
    """Returns weighted sums over blocks, "loss_ce" (L,) being "loss_<kind>_ce" then.

    Summed, because a log with each block of each kind of query would not be read.
    """
    return {
        name.replace("loss_", f"loss_{kind}_"): weight * loss.sum() for name, loss in losses.items()
    }
