# Copyright (c) qbheat_det contributors. Apache-2.0.
"""One-to-one assignment of ground-truth boxes to predictions.

Paper: "End-to-End Object Detection with Transformers", arXiv:2005.12872, Sec. 3.1. All decoder
blocks and images of a step are matched at once: costs on the device, one transfer, SciPy's solver.
"""

from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torchvision.ops import box_convert, generalized_box_iou

from .classification_losses import ClassificationLoss, SoftmaxClassification


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
            # Filled with whole-image boxes: no division by an empty union, never matched.
            boxes=pad_sequence(boxes, batch_first=True, padding_value=1.0),
            counts=tuple(len(each) for each in labels),
        )


@dataclass(frozen=True)
class Matches:
    """Pairs (block, image, query) -> target; each field is (P,) on the predictions' device."""

    block: Tensor
    image: Tensor
    query: Tensor
    target: Tensor

    def to(self, device: torch.device) -> "Matches":
        """Moves the fields, without waiting for the device."""
        fields = (self.block, self.image, self.query, self.target)
        return Matches(*(field.to(device, non_blocking=True) for field in fields))


class HungarianMatcher:
    """Cheapest assignment under the cost of the class, L1 of cxcywh and -GIoU."""

    def __init__(
        self,
        *,
        class_weight: float,
        l1_weight: float,
        giou_weight: float,
        classification: ClassificationLoss | None = None,
    ) -> None:
        """
        Args:
            class_weight: weight of the class term.
            l1_weight: weight of the L1 term.
            giou_weight: weight of the GIoU term.
            classification: gives the class term; DETR's, -p(class), by default.

        Raises:
            ValueError: all weights are zero.
        """
        if not (class_weight or l1_weight or giou_weight):
            raise ValueError("all three matching weights are zero")
        self.class_weight = class_weight
        self.l1_weight = l1_weight
        self.giou_weight = giou_weight
        self.classification = classification or SoftmaxClassification()

    @torch.no_grad()
    def __call__(self, logits: Tensor, boxes: Tensor, targets: Targets) -> Matches:
        """
        Args:
            logits: (L, N, Q, K + 1), the last class being "no object".
            boxes: (L, N, Q, 4), cxcywh in [0, 1] of the unpadded image.
            targets: ground truth of the N images.

        Returns:
            min(Q, T_i) pairs for each block and image i, ordered by block, image and query.
        """
        cost = self.cost(logits.float(), boxes.float(), targets).cpu().numpy()
        rows = [np.empty((4, 0), dtype=np.int64)]
        for block, image in np.ndindex(*cost.shape[:2]):
            query, target = linear_sum_assignment(cost[block, image, :, : targets.counts[image]])
            where = np.broadcast_to([[block], [image]], (2, len(query)))
            rows.append(np.concatenate([where, query[None], target[None]]))
        index = torch.from_numpy(np.concatenate(rows, axis=1)).to(boxes.device, non_blocking=True)
        return Matches(*index)

    def cost(self, logits: Tensor, boxes: Tensor, targets: Targets) -> Tensor:
        """Returns (L, N, Q, T); columns beyond an image's count mean nothing."""
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
        # A diverged model must reach the trainer's check of the loss, not crash the solver.
        return cost.nan_to_num(nan=1e6, posinf=1e6, neginf=-1e6)
