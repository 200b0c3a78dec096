# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The set prediction loss of DETR.

Paper: "End-to-End Object Detection with Transformers", arXiv:2005.12872, Sec. 3.1. Deviation: all
blocks are computed in one pass; the sums are those of the paper.
"""

from collections.abc import Sequence

import torch
from detectron2.utils import comm
from torch import Tensor, nn
from torchvision.ops import box_convert, box_iou, generalized_box_iou

from .classification_losses import ClassificationLoss, SoftmaxClassification
from .matcher import HungarianMatcher, Matches, Targets


class SetCriterion(nn.Module):
    """Matches predictions to ground truth; losses of class, L1 and GIoU, already weighted."""

    def __init__(
        self,
        *,
        matcher: HungarianMatcher,
        num_classes: int,
        classification: ClassificationLoss | None = None,
        class_weight: float = 1.0,
        l1_weight: float = 5.0,
        giou_weight: float = 2.0,
        deep_supervision: bool = True,
    ) -> None:
        """
        Args:
            matcher: assigns ground truth to predictions.
            num_classes: K, without the no-object class.
            classification: the loss of class; DETR's by default. The matcher should have the same.
            class_weight: weight of the loss of class.
            l1_weight: weight of the L1 distance of cxcywh boxes.
            giou_weight: weight of 1 - GIoU.
            deep_supervision: whether every block's prediction has a loss, or the last one's only.
        """
        super().__init__()
        self.matcher = matcher
        self.num_classes = num_classes
        self.classification = classification or SoftmaxClassification()
        self.class_weight = class_weight
        self.l1_weight = l1_weight
        self.giou_weight = giou_weight
        self.deep_supervision = deep_supervision

    def forward(
        self,
        outputs: dict[str, Tensor],
        targets: Targets,
        normalizers: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """
        Args:
            outputs: "pred_logits" (L, N, Q, K + 1) and "pred_boxes" (L, N, Q, 4), cxcywh in [0, 1]
                of the unpadded image, one entry of L a block.
            targets: ground truth of the N images.
            normalizers: (2,), mean of what ``normalizers`` returns over all parts of the
                effective batch; over the processes of this call if None.

        Returns:
            "loss_ce", "loss_bbox", "loss_giou" of the last block, and the same with "_0", "_1", …
            of the earlier ones. Weighted; their sum is the loss.
        """
        logits, boxes = self.supervised(outputs)
        matches = self.matcher(logits, boxes, targets)
        if normalizers is None:
            counts = logits.new_tensor(self.normalizers(targets.counts, logits.shape[2]))
            normalizers = self.normalizers_of_processes(counts)
        losses = self.block_losses(logits, boxes, targets, matches, normalizers)
        last = len(logits) - 1
        return {
            name if block == last else f"{name}_{block}": loss[block]
            for block in range(last + 1)
            for name, loss in losses.items()
        }

    def supervised(self, outputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Returns logits and boxes of the blocks that have a loss, in float32."""
        first = 0 if self.deep_supervision else -1
        return outputs["pred_logits"][first:].float(), outputs["pred_boxes"][first:].float()

    def block_losses(
        self,
        logits: Tensor,
        boxes: Tensor,
        targets: Targets,
        matches: Matches,
        normalizers: Tensor,
    ) -> dict[str, Tensor]:
        """Returns weighted "loss_ce", "loss_bbox" and "loss_giou", (L,) each.

        Args:
            logits: (L, N, Q, K + 1).
            boxes: (L, N, Q, 4), cxcywh in [0, 1] of the unpadded image.
            targets: ground truth of the N images.
            matches: which query is to find which box.
            normalizers: (2,), what the sums of classes and of boxes are divided by.
        """
        classes, num_boxes = normalizers
        class_sums = self.class_losses(logits, boxes, targets, matches).sum(dim=(1, 2))
        return {
            "loss_ce": self.class_weight * class_sums / classes,
            **self.localisation(boxes, targets, matches, num_boxes),
        }

    def normalizers(self, counts: Sequence[int], num_queries: int) -> tuple[float, float]:
        """Returns what a batch's sums are divided by, were it alone: of classes, and of boxes.

        Args:
            counts: boxes of each image.
            num_queries: Q.
        """
        # The same for every block: each takes as many matches as there are boxes and queries for.
        matched = sum(min(count, num_queries) for count in counts)
        unmatched = len(counts) * num_queries - matched
        return self.classification.normalizer(matched, unmatched), float(sum(counts))

    def mean_normalizers(self, totals: Tensor, parts: int) -> Tensor:
        """Returns (…, 2): what each part of an effective batch divides by, so that their mean fits.

        Args:
            totals: (…, 2), sums of ``normalizers`` over all parts.
            parts: how many there are, over micro-batches and processes.
        """
        # The whole batch's sums are never divided by less than this, whatever the parts.
        least = totals.new_tensor([self.classification.least_normalizer, 1e-6])
        return totals.maximum(least) / parts

    def normalizers_of_processes(self, counts: Tensor) -> Tensor:
        """Returns ``mean_normalizers``, (…, 2), of a batch that the processes share.

        Args:
            counts: (…, 2), ``normalizers`` of this process's part.
        """
        if comm.get_world_size() > 1:
            counts = counts.clone()
            torch.distributed.all_reduce(counts)
        return self.mean_normalizers(counts, comm.get_world_size())

    def class_losses(
        self, logits: Tensor, boxes: Tensor, targets: Targets, matches: Matches
    ) -> Tensor:
        """Returns (L, N, Q): what each query's logits cost, before weights and division."""
        where = (matches.block, matches.image, matches.query)
        wanted = torch.full(logits.shape[:3], self.num_classes, device=logits.device)
        wanted[where] = targets.labels[matches.image, matches.target]
        quality = boxes.new_zeros(wanted.shape)
        if self.classification.reads_quality:
            true_boxes = targets.boxes[matches.image, matches.target]
            quality[where] = paired_iou(boxes.detach()[where], true_boxes)
        return self.classification.loss(logits, wanted, quality)

    def localisation(
        self, boxes: Tensor, targets: Targets, matches: Matches, num_boxes: Tensor
    ) -> dict[str, Tensor]:
        """Returns weighted "loss_bbox" and "loss_giou", (L,) each, divided by ``num_boxes``."""
        predicted = boxes[matches.block, matches.image, matches.query]  # (P, 4)
        wanted = targets.boxes[matches.image, matches.target]
        distance = (predicted - wanted).abs().sum(dim=-1)
        corners = (box_convert(each, "cxcywh", "xyxy")[:, None] for each in (predicted, wanted))
        overlap = torch.vmap(generalized_box_iou)(*corners)[:, 0, 0]
        by_block = boxes.new_zeros(len(boxes))
        return {
            "loss_bbox": by_block.index_add(0, matches.block, distance)
            * (self.l1_weight / num_boxes),
            "loss_giou": by_block.index_add(0, matches.block, 1 - overlap)
            * (self.giou_weight / num_boxes),
        }


def paired_iou(first: Tensor, second: Tensor) -> Tensor:
    """Returns (P,): IoU of boxes (P, 4) with boxes (P, 4), cxcywh, one by one."""
    corners = (box_convert(each, "cxcywh", "xyxy")[:, None] for each in (first, second))
    return torch.vmap(box_iou)(*corners)[:, 0, 0]
