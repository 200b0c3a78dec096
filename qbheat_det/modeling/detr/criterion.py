# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The set prediction loss of DETR: one-to-one matching of boxes to queries, then losses.

Paper: "End-to-End Object Detection with Transformers", arXiv:2005.12872, Sec. 3.1. Deviation: all
decoder blocks and images of a step are computed at once: matching costs on the device, one
transfer, SciPy's solver. The sums are those of the paper.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from detectron2.utils import comm
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torchvision.ops import box_convert, box_iou, generalized_box_iou

from .losses import ClassificationLoss, SoftmaxClassification


@dataclass(frozen=True)
class Targets:
    """Ground truth of a batch, padded to the image with the most boxes (T of them).

    ``labels`` is (N, T) in [0, K), ``boxes`` (N, T, 4), cxcywh in [0, 1] of the unpadded image.
    ``counts`` holds how many of the T are real, image by image.
    """

    labels: Tensor
    boxes: Tensor
    counts: tuple[int, ...]

    @classmethod
    def stack(cls, labels: list[Tensor], boxes: list[Tensor]) -> "Targets":
        """Pads per-image labels (T_i,) and boxes (T_i, 4)."""
        return cls(
            labels=pad_sequence(labels, batch_first=True),
            # Padded with non-empty boxes, so that no union is 0; they are never matched.
            boxes=pad_sequence(boxes, batch_first=True, padding_value=1.0),
            counts=tuple(len(each) for each in labels),
        )


class Matches(NamedTuple):
    """Pairs (block, image, query) -> target; each field is (P,) on the predictions' device."""

    block: Tensor
    image: Tensor
    query: Tensor
    target: Tensor


class SetCriterion(nn.Module):
    """Matches predictions to ground truth; losses of class, L1 and GIoU, already weighted."""

    def __init__(
        self,
        *,
        num_classes: int,
        classification: ClassificationLoss | None = None,
        class_weight: float = 1.0,
        l1_weight: float = 5.0,
        giou_weight: float = 2.0,
        deep_supervision: bool = True,
    ) -> None:
        """
        Args:
            num_classes: K, without the no-object class.
            classification: DETR's by default.
            class_weight: weight of the class, in the loss and in matching.
            l1_weight: weight of the L1 distance of cxcywh boxes.
            giou_weight: weight of 1 - GIoU.
            deep_supervision: whether every block has losses, or the last one only.

        Raises:
            ValueError: all weights are zero.
        """
        super().__init__()
        if not (class_weight or l1_weight or giou_weight):
            raise ValueError("CLASS_WEIGHT, L1_WEIGHT and GIOU_WEIGHT are all zero")
        self.num_classes = num_classes
        self.classification = classification or SoftmaxClassification()
        self.class_weight = class_weight
        self.l1_weight = l1_weight
        self.giou_weight = giou_weight
        self.deep_supervision = deep_supervision

    def forward(
        self, outputs: dict[str, Tensor], targets: Targets, normalizers: Tensor
    ) -> dict[str, Tensor]:
        """Returns weighted "loss_ce", "loss_bbox" and "loss_giou"; of inner blocks with "_0" ….

        Args:
            outputs: "pred_logits" (L, N, Q, K + 1) and "pred_boxes" (L, N, Q, 4), cxcywh in [0, 1]
                of the unpadded image, one entry of L a block.
            targets: ground truth of the N images.
            normalizers: (2,), from ``mean_normalizers`` of the effective batch.
        """
        logits, boxes = self.supervised(outputs)
        losses = self.block_losses(logits, boxes, targets, normalizers)
        last = len(logits) - 1
        return {
            name if block == last else f"{name}_{block}": loss[block]
            for block in range(last + 1)
            for name, loss in losses.items()
        }

    @torch.no_grad()
    def match(self, logits: Tensor, boxes: Tensor, targets: Targets) -> Matches:
        """Returns the assignment of least cost: of the class, L1 of cxcywh and -GIoU.

        Of logits (L, N, Q, K + 1) and boxes (L, N, Q, 4) these are min(Q, T_i) pairs for each block
        and image i, ordered by block, image and query.
        """
        cost = self.matching_cost(logits.float(), boxes.float(), targets).cpu().numpy()
        rows = [np.empty((4, 0), dtype=np.int64)]
        for block, image in np.ndindex(*cost.shape[:2]):
            query, target = linear_sum_assignment(cost[block, image, :, : targets.counts[image]])
            where = np.broadcast_to([[block], [image]], (2, len(query)))
            rows.append(np.concatenate([where, query[None], target[None]]))
        index = torch.from_numpy(np.concatenate(rows, axis=1)).to(boxes.device, non_blocking=True)
        return Matches(*index)

    def matching_cost(self, logits: Tensor, boxes: Tensor, targets: Targets) -> Tensor:
        """Returns (L, N, Q, T); columns beyond an image's count are padding."""
        labels = targets.labels[None, :, None].expand(*logits.shape[:3], -1)
        distance = torch.cdist(boxes, targets.boxes[None].expand(len(boxes), -1, -1, -1), p=1)
        predicted = box_convert(boxes, "cxcywh", "xyxy")
        wanted = box_convert(targets.boxes, "cxcywh", "xyxy")
        pairwise = torch.vmap(torch.vmap(generalized_box_iou), in_dims=(0, None))
        cost = (
            self.l1_weight * distance
            + self.class_weight * self.classification.matching_cost(logits, labels)
            - self.giou_weight * pairwise(predicted, wanted)
        )
        # The trainer's check of the loss reports a diverged model; the solver would crash.
        return cost.nan_to_num(nan=1e6, posinf=1e6, neginf=-1e6)

    def supervised(self, outputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Returns logits and boxes of the blocks that have a loss, in float32."""
        first = 0 if self.deep_supervision else -1
        return outputs["pred_logits"][first:].float(), outputs["pred_boxes"][first:].float()

    def block_losses(
        self,
        logits: Tensor,
        boxes: Tensor,
        targets: Targets,
        normalizers: Tensor,
        matches: Matches | None = None,
    ) -> dict[str, Tensor]:
        """Returns weighted "loss_ce", "loss_bbox", "loss_giou", (L,), as ``forward``."""
        if matches is None:
            matches = self.match(logits, boxes, targets)
        classes, num_boxes = normalizers
        class_sums = self.class_losses(logits, boxes, targets, matches).sum(dim=(1, 2))
        return {
            "loss_ce": self.class_weight * class_sums / classes,
            **self.localisation(boxes, targets, matches, num_boxes),
        }

    def normalizers(self, counts: Sequence[int], num_queries: int) -> tuple[float, float]:
        """Returns the divisors of a batch's sums, of classes and boxes, from its boxes."""
        # The same for every block, which all have as many matches.
        matched = sum(min(count, num_queries) for count in counts)
        unmatched = len(counts) * num_queries - matched
        return self.classification.normalizer(matched, unmatched), float(sum(counts))

    def mean_normalizers(self, totals: Tensor, parts: int) -> Tensor:
        """From sums (…, 2) of ``normalizers`` over all parts to the divisors of each, (…, 2)."""
        # The least divisors of the whole batch.
        least = torch.tensor([self.classification.least_normalizer, 1e-6])
        return totals.maximum(least.to(totals.device, non_blocking=True)) / parts

    def normalizers_of_processes(self, counts: Tensor) -> Tensor:
        """From ``normalizers`` of this process to ``mean_normalizers`` of all, (…, 2)."""
        if comm.get_world_size() > 1:
            counts = counts.clone()
            torch.distributed.all_reduce(counts)
        return self.mean_normalizers(counts, comm.get_world_size())

    def class_losses(
        self, logits: Tensor, boxes: Tensor, targets: Targets, matches: Matches
    ) -> Tensor:
        """Returns (L, N, Q): the classification loss of each query, not weighted or divided."""
        where = (matches.block, matches.image, matches.query)
        wanted = torch.full(logits.shape[:3], self.num_classes, device=logits.device)
        wanted[where] = targets.labels[matches.image, matches.target]
        quality = boxes.new_zeros(wanted.shape)
        if self.classification.reads_quality:
            true_boxes = targets.boxes[matches.image, matches.target]
            quality[where] = _pair_by_pair(box_iou, boxes.detach()[where], true_boxes)
        return self.classification.loss(logits, wanted, quality)

    def localisation(
        self, boxes: Tensor, targets: Targets, matches: Matches, num_boxes: Tensor
    ) -> dict[str, Tensor]:
        """Returns weighted "loss_bbox" and "loss_giou", (L,) each, divided by ``num_boxes``."""
        predicted = boxes[matches.block, matches.image, matches.query]  # (P, 4)
        wanted = targets.boxes[matches.image, matches.target]
        distance = (predicted - wanted).abs().sum(dim=-1)
        overlap = _pair_by_pair(generalized_box_iou, predicted, wanted)
        by_block = boxes.new_zeros(len(boxes))
        return {
            "loss_bbox": by_block.index_add(0, matches.block, distance)
            * (self.l1_weight / num_boxes),
            "loss_giou": by_block.index_add(0, matches.block, 1 - overlap)
            * (self.giou_weight / num_boxes),
        }


def _pair_by_pair(overlap: Callable[..., Tensor], first: Tensor, second: Tensor) -> Tensor:
    """Returns (P,): the overlap of boxes (P, 4) with boxes (P, 4), cxcywh, pair by pair."""
    corners = (box_convert(each, "cxcywh", "xyxy")[:, None] for each in (first, second))
    return torch.vmap(overlap)(*corners)[:, 0, 0]
