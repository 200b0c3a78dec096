# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Further groups of object queries in training, each matched one-to-one on its own.

Paper: "Group DETR: Fast DETR Training with Group-Wise One-to-Many Assignment", arXiv:2207.13085.
Each box then has as many queries that learn from it as there are groups, and the decoder's weights
as many times the signal; the first group is the decoder's own and the only one in inference.
Deviation: the map, which the paper's decoder does not change, reads the first group alone.
"""

import torch
from torch import Tensor, nn

from .criterion import SetCriterion
from .extra_queries import ExtraQueries, sum_blocks
from .matcher import Targets

_MOST_GROUPS = 100


class QueryGroups(nn.Module):
    """G further sets of Q object queries, and their losses."""

    def __init__(self, *, num_groups: int, num_queries: int, dim: int, weight: float = 1.0) -> None:
        """
        Args:
            num_groups: G, without the decoder's own group.
            num_queries: Q, of each group.
            dim: C, width of the decoder's queries.
            weight: factor on the losses of each group; with 1 it counts as the decoder's own.

        Raises:
            ValueError: there is no group, or more than a hundred, or the weight is negative.
        """
        super().__init__()
        if not 1 <= num_groups < _MOST_GROUPS:
            raise ValueError(
                f"MODEL.MF_DETR.QUERY_GROUPS.COUNT is {num_groups + 1}, but a part with groups has "
                f"2 to {_MOST_GROUPS}: attention grows with their square"
            )
        if weight < 0:
            raise ValueError(
                f"MODEL.MF_DETR.QUERY_GROUPS.WEIGHT is {weight}, but must be at least 0"
            )
        self.num_groups = num_groups
        self.weight = weight
        self.position = nn.Embedding(num_groups * num_queries, dim)  # standard normal, as the own

    def forward(self, num_images: int) -> ExtraQueries:
        """Returns the queries for a batch, (N, G * Q, C), group behind group."""
        position = self.position.weight.expand(num_images, -1, -1)
        index = torch.arange(len(self.position.weight), device=position.device)
        group = index // (len(index) // self.num_groups)
        return ExtraQueries(
            content=torch.zeros_like(position),
            position=position,
            hidden=(group[:, None] != group)[None],
            sees_own=torch.zeros_like(index, dtype=torch.bool),
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
            criterion: matches a group and says what it costs.
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
        found = criterion.block_losses(logits, boxes, targets, matches, normalizers)
        return sum_blocks(found, kind="group", weight=self.weight)
