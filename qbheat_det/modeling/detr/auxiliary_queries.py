# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Queries that pass through MF-DETR's decoder beside its own in training, and their losses.

They attend to the map and are refined by the same weights, but neither the object queries nor the
map read them. Two kinds: denoising queries (``denoising.py``), and groups of object queries, each
matched one-to-one.

Paper of the latter: "Group DETR: Fast DETR Training with Group-Wise One-to-Many Assignment",
arXiv:2207.13085. Each box then trains as many queries as there are groups; the first group is the
decoder's own and the only one in inference. Deviation: the map, which the paper's decoder does not
change, reads the first group alone.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .criterion import SetCriterion, Targets
from .denoising import Denoising
from .query_set import QuerySet, join_queries, sum_blocks

_MOST_GROUPS = 100


class QueryGroups(nn.Module):
    """G further sets of Q object queries, and their losses."""

    def __init__(self, *, num_groups: int, num_queries: int, dim: int, weight: float = 1.0) -> None:
        """Args:
        num_groups: G, without the decoder's own group; 1 to 99.
        num_queries: Q, of each group.
        dim: C, width of the decoder's queries.
        weight: factor on the losses of each group; 1 is the weight of the decoder's own.
        """
        super().__init__()
        if not 1 <= num_groups < _MOST_GROUPS:
            raise ValueError(
                f"MODEL.MF_DETR.QUERY_GROUPS.COUNT is 2 to {_MOST_GROUPS} with groups, not "
                f"{num_groups + 1}: the cost of attention grows with its square"
            )
        if weight < 0:
            raise ValueError(f"MODEL.MF_DETR.QUERY_GROUPS.WEIGHT is at least 0, not {weight}")
        self.num_groups = num_groups
        self.weight = weight
        self.position = nn.Embedding(num_groups * num_queries, dim)  # standard normal, as the own

    def forward(self, num_images: int) -> QuerySet:
        """Returns the queries for a batch, (N, G * Q, C), one group after the other."""
        position = self.position.weight.expand(num_images, -1, -1)
        index = torch.arange(len(self.position.weight), device=position.device)
        group = index // (len(index) // self.num_groups)
        return QuerySet(
            content=torch.zeros_like(position),
            position=position,
            masked=(group[:, None] != group)[None],
            reads_own=torch.zeros_like(index, dtype=torch.bool),
        )

    def losses(
        self,
        logits: Tensor,
        boxes: Tensor,
        targets: Targets,
        criterion: SetCriterion,
        normalizers: Tensor,
    ) -> dict[str, Tensor]:
        """
        Args:
            logits: (L, N, G * Q, K + 1).
            boxes: (L, N, G * Q, 4), cxcywh in [0, 1] of the unpadded image.
            targets: ground truth of the N images.
            criterion: matches a group and computes its losses.
            normalizers: (2,), of classes and of boxes, those of the decoder's own queries.

        Returns:
            "loss_group_ce", "loss_group_bbox" and "loss_group_giou", weighted sums over the L
            blocks and the G groups.
        """
        # A group of a block is matched as a block is: (L * G, N, Q, …).
        logits, boxes = (
            each.unflatten(2, (self.num_groups, -1)).transpose(1, 2).flatten(0, 1)
            for each in (logits, boxes)
        )
        matches = criterion.matcher(logits, boxes, targets)
        losses = criterion.block_losses(logits, boxes, targets, matches, normalizers)
        return sum_blocks(losses, kind="group", weight=self.weight)


class AuxiliaryQueries(nn.Module):
    """Groups of object queries, denoising queries, or both."""

    def __init__(
        self, *, groups: QueryGroups | None = None, denoising: Denoising | None = None
    ) -> None:
        super().__init__()
        self.groups = groups
        self.denoising = denoising

    def forward(self, targets: Targets) -> QuerySet:
        """Returns the queries for a batch: those of groups, then those of denoising."""
        parts = []
        if self.groups is not None:
            parts.append(self.groups(len(targets.counts)))
        if self.denoising is not None:
            parts.append(self.denoising(targets))
        return join_queries(parts)

    def losses(
        self,
        outputs: dict[str, Tensor],
        targets: Targets,
        criterion: SetCriterion,
        normalizers: Tensor,
    ) -> dict[str, Tensor]:
        """
        Args:
            outputs: "pred_logits" (L, N, E, K + 1) and "pred_boxes" (L, N, E, 4), cxcywh in [0, 1]
                of the unpadded image, of the queries from ``forward``.
            targets: ground truth of the N images.
            criterion: of the decoder's own queries.
            normalizers: (P, 2), of the decoder's own queries and from ``normalizers``.

        Returns:
            Weighted losses by name, each the sum over the blocks.
        """
        logits, boxes = criterion.supervised(outputs)
        num_grouped = 0 if self.groups is None else len(self.groups.position.weight)
        losses: dict[str, Tensor] = {}
        if self.groups is not None:
            grouped = (logits[:, :, :num_grouped], boxes[:, :, :num_grouped])
            losses |= self.groups.losses(*grouped, targets, criterion, normalizers[0])
        if self.denoising is not None:
            noised = (logits[:, :, num_grouped:], boxes[:, :, num_grouped:])
            losses |= self.denoising.losses(*noised, targets, criterion, normalizers[1])
        return losses

    def normalizers(
        self, counts: Sequence[int], criterion: SetCriterion
    ) -> list[tuple[float, float]]:
        """Returns divisors of the losses that do not share those of the decoder's own queries."""
        return [] if self.denoising is None else [self.denoising.normalizers(counts, criterion)]
