# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The set prediction loss of DETR.

Paper: "End-to-End Object Detection with Transformers", arXiv:2005.12872, Sec. 3.1. Deviation: all
blocks are computed in one pass; the sums are those of the paper.
"""

from collections.abc import Sequence

import torch
from detectron2.utils import comm
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.ops import box_convert, generalized_box_iou

from .matcher import HungarianMatcher, Matches, Targets


class SetCriterion(nn.Module):
    """Matches predictions to ground truth, then cross-entropy, L1 and GIoU, already weighted."""

    def __init__(
        self,
        *,
        matcher: HungarianMatcher,
        num_classes: int,
        class_weight: float = 1.0,
        l1_weight: float = 5.0,
        giou_weight: float = 2.0,
        no_object_weight: float = 0.1,
        deep_supervision: bool = True,
    ) -> None:
        """
        Args:
            matcher: assigns ground truth to predictions.
            num_classes: K, without the no-object class.
            class_weight: weight of the cross-entropy.
            l1_weight: weight of the L1 distance of cxcywh boxes.
            giou_weight: weight of 1 - GIoU.
            no_object_weight: weight of the no-object class within the cross-entropy.
            deep_supervision: whether every block's prediction has a loss, or the last one's only.
        """
        super().__init__()
        self.matcher = matcher
        self.num_classes = num_classes
        self.class_weight = class_weight
        self.l1_weight = l1_weight
        self.giou_weight = giou_weight
        self.no_object_weight = no_object_weight
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
        first = 0 if self.deep_supervision else -1
        logits, boxes = (outputs[key][first:].float() for key in ("pred_logits", "pred_boxes"))
        matches = self.matcher(logits, boxes, targets)
        if normalizers is None:
            counts = self.normalizers(targets.counts, logits.shape[2])
            normalizers = _mean_over_processes(logits.new_tensor(counts))
        classes, num_boxes = normalizers
        losses = {
            "loss_ce": self.class_weight * self.classification(logits, targets, matches) / classes,
            **self.localisation(boxes, targets, matches, num_boxes),
        }
        last = len(logits) - 1
        return {
            name if block == last else f"{name}_{block}": loss[block]
            for block in range(last + 1)
            for name, loss in losses.items()
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
        return matched + self.no_object_weight * unmatched, float(sum(counts))

    def classification(self, logits: Tensor, targets: Targets, matches: Matches) -> Tensor:
        """Returns (L,): weighted sum of the cross-entropy over all queries of the batch."""
        wanted = torch.full(logits.shape[:3], self.num_classes, device=logits.device)
        labels = targets.labels[matches.image, matches.target]
        wanted[matches.block, matches.image, matches.query] = labels
        weight = logits.new_ones(self.num_classes + 1)
        weight[-1] = self.no_object_weight
        loss = F.cross_entropy(logits.permute(0, 3, 1, 2), wanted, weight, reduction="none")
        return loss.sum(dim=(1, 2))

    def localisation(
        self, boxes: Tensor, targets: Targets, matches: Matches, num_boxes: Tensor
    ) -> dict[str, Tensor]:
        """Returns weighted "loss_bbox" and "loss_giou", (L,) each, divided by ``num_boxes``."""
        predicted = boxes[matches.block, matches.image, matches.query]  # (P, 4)
        wanted = targets.boxes[matches.image, matches.target]
        distance = (predicted - wanted).abs().sum(dim=-1)
        corners = (box_convert(each, "cxcywh", "xyxy")[:, None] for each in (predicted, wanted))
        overlap = torch.vmap(generalized_box_iou)(*corners)[:, 0, 0]
        num_boxes = num_boxes.clamp(min=1e-6)  # without a box anywhere, the sums are zero
        by_block = boxes.new_zeros(len(boxes))
        return {
            "loss_bbox": by_block.index_add(0, matches.block, distance)
            * (self.l1_weight / num_boxes),
            "loss_giou": by_block.index_add(0, matches.block, 1 - overlap)
            * (self.giou_weight / num_boxes),
        }


def _mean_over_processes(values: Tensor) -> Tensor:
    """Averages counts, so that the mean of all processes' gradients is that of the whole batch."""
    if comm.get_world_size() > 1:
        torch.distributed.all_reduce(values)
    return values / comm.get_world_size()
