# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What MF-DETR may have in training and never in inference: further queries and their losses."""

from collections.abc import Sequence

from torch import Tensor, nn

from .criterion import SetCriterion
from .denoising import Denoising
from .extra_queries import ExtraQueries, join_queries
from .matcher import Targets
from .query_groups import QueryGroups


class TrainingHelp(nn.Module):
    """Groups of object queries, denoising queries, or both."""

    def __init__(
        self, *, groups: QueryGroups | None = None, denoising: Denoising | None = None
    ) -> None:
        """
        Args:
            groups: further groups of object queries.
            denoising: queries made of the ground truth.

        Raises:
            ValueError: there is neither.
        """
        super().__init__()
        if groups is None and denoising is None:
            raise ValueError("a training-only help has groups of queries, denoising, or both")
        self.groups = groups
        self.denoising = denoising

    def forward(self, targets: Targets) -> ExtraQueries:
        """Returns the further queries for a batch: those of groups, then those of denoising."""
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
                of the unpadded image, of the queries that ``forward`` gave.
            targets: ground truth of the N images.
            criterion: the losses of the decoder's own queries.
            normalizers: (P, 2), of the decoder's own queries and of what ``normalizers`` names.

        Returns:
            Losses by name, weighted, each the sum over the blocks.
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
        """Returns what sums are divided by that are not divided as the decoder's own are.

        Args:
            counts: boxes of each image.
            criterion: the losses.
        """
        return [] if self.denoising is None else [self.denoising.normalizers(counts, criterion)]
