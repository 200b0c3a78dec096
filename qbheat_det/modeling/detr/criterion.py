# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The set prediction loss of DETR: one-to-one matching of boxes to queries, then losses.

Paper: "End-to-End Object Detection with Transformers", arXiv:2005.12872, Sec. 3.1. Deviation: the
matching costs of all decoder blocks and images are computed on the device. They are copied to the
CPU in one transfer, for SciPy's solver.

Focal loss: arXiv:1708.02002. IoU targets follow "Generalized Focal Loss", arXiv:2006.04388. The
matching cost of the focal loss follows "Deformable DETR", arXiv:2010.04159. Deviations: the target
of a match may be between the IoU and 1 (``iou_target``), and losses are weighted by the alpha of
the original focal loss.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torchvision.ops import box_convert, box_iou, generalized_box_iou

from qbheat_det.modeling.annotated_classes import ignore_unannotated
from qbheat_det.modeling.checks import check_value


@dataclass(frozen=True)
class Targets:
    """Ground truth of a batch, padded to T, the largest number of boxes in an image.

    Attributes:
        labels: classes (N, T), in [0, K).
        boxes: (N, T, 4), cxcywh in [0, 1] of the unpadded image.
        counts: number of boxes of each image, without padding.
        is_annotated: (N, K), True where all objects of a class are labelled in an image. None if
            all objects are.
    """

    labels: Tensor
    boxes: Tensor
    counts: tuple[int, ...]
    is_annotated: Tensor | None = None

    @classmethod
    def stack(
        cls, labels: list[Tensor], boxes: list[Tensor], is_annotated: Tensor | None = None
    ) -> "Targets":
        """Pads and stacks the labels (T_i,) and boxes (T_i, 4) of each image."""
        return cls(
            labels=pad_sequence(labels, batch_first=True),
            # Boxes with an area, so that the IoU is not 0 / 0. These boxes are never matched.
            boxes=pad_sequence(boxes, batch_first=True, padding_value=1.0),
            counts=tuple(len(image_labels) for image_labels in labels),
            is_annotated=is_annotated,
        )


class Matches(NamedTuple):
    """P matches of a query with a target, as indices (P,)."""

    block: Tensor  # decoder block
    image: Tensor  # image of the batch
    query: Tensor  # query of the image
    target: Tensor  # box of the image


class SoftmaxClassification:
    """DETR's softmax over K + 1 classes, with a smaller weight for unmatched queries.

    The last class is "no object".
    """

    initial_bias = 0.0
    """Initial bias of the logits."""
    least_normalizer = 1e-6
    """Lower bound of the divisor of the loss. The divisor is 0 only if the loss is 0."""
    reads_quality = False
    """Whether ``loss`` uses its argument ``quality``."""

    def __init__(self, *, no_object_weight: float = 0.1) -> None:
        """Takes the weight of unmatched queries."""
        self.no_object_weight = no_object_weight

    def loss(self, logits: Tensor, classes: Tensor, quality: Tensor) -> Tensor:
        """Returns the loss (N, …) of each query, before division by ``normalizer``.

        Args:
            logits: (N, …, K + 1), float32.
            classes: (N, …), true classes in [0, K], where K is "no object".
            quality: (N, …), IoU of the predicted box with the matched box, without gradient. 0 for
                unmatched queries.
        """
        class_weights = logits.new_ones(logits.shape[-1])  # (K + 1,)
        class_weights[-1] = self.no_object_weight
        # cross_entropy expects the classes in the second dimension.
        return F.cross_entropy(logits.movedim(-1, 1), classes, class_weights, reduction="none")

    def normalizer(self, matched: int, unmatched: int) -> float:
        """Takes the numbers of matched and unmatched queries. Returns the divisor of the loss."""
        return matched + self.no_object_weight * unmatched

    def scores(self, logits: Tensor) -> Tensor:
        """Takes logits (…, K + 1) and returns class probabilities (…, K)."""
        return logits.softmax(dim=-1)[..., :-1]

    def matching_cost(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Takes logits (…, K + 1) and classes (…, T). Returns minus the probabilities (…, T)."""
        return -self.scores(logits).gather(-1, labels)


class FocalClassification:
    """Focal loss on a sigmoid per class. The last of the K + 1 logits is not used.

    The loss of a class is the binary cross-entropy between its probability p and its target t. It
    is multiplied by abs(t - p)^gamma, and by alpha for the true class or 1 - alpha for other
    classes. With ``iou_target`` 0, this is RetinaNet's focal loss. With 1, the true class learns
    the IoU, as in the quality focal loss. The methods are those of ``SoftmaxClassification``.
    """

    least_normalizer = 1.0
    reads_quality = True

    def __init__(
        self,
        *,
        gamma: float = 2.0,
        alpha: float = 0.25,
        iou_target: float = 1.0,
        prior: float = 0.01,
    ) -> None:
        """
        Args:
            gamma: exponent of the distance between target and prediction.
            alpha: weight of the true class. All other classes have the weight 1 - alpha.
            iou_target: weight w of the IoU in the target of the true class, 1 - w + w * IoU.
            prior: initial probability of each class.

        Raises:
            ValueError: a number is out of range.
        """
        # For gamma between 0 and 1, the gradient diverges if a prediction equals its target.
        check_value(gamma == 0 or gamma >= 1, "MF_DETR.FOCAL.GAMMA", gamma, "0 or at least 1")
        check_value(0 <= alpha <= 1, "MF_DETR.FOCAL.ALPHA", alpha, "in [0, 1]")
        check_value(0 <= iou_target <= 1, "MF_DETR.FOCAL.IOU_TARGET", iou_target, "in [0, 1]")
        check_value(0 < prior < 1, "MF_DETR.FOCAL.PRIOR", prior, "between 0 and 1")
        self.gamma = gamma
        self.alpha = alpha
        self.iou_target = iou_target
        self.initial_bias = -math.log((1 - prior) / prior)

    def loss(self, logits: Tensor, classes: Tensor, quality: Tensor) -> Tensor:
        """Returns the loss (N, …) of each query, summed over classes."""
        logits = logits[..., :-1]  # (N, …, K)
        class_indices = torch.arange(logits.shape[-1], device=logits.device)
        is_true_class = classes[..., None] == class_indices  # (N, …, K)
        target_of_true_class = 1 - self.iou_target * (1 - quality)  # (N, …)
        target = target_of_true_class[..., None] * is_true_class
        cross_entropy = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
        class_weight = self.alpha * is_true_class + (1 - self.alpha) * ~is_true_class
        distance = (target - logits.sigmoid()).abs()
        return (class_weight * distance.pow(self.gamma) * cross_entropy).sum(dim=-1)

    def normalizer(self, matched: int, unmatched: int) -> float:
        """Returns the number of matched queries as the divisor of the loss."""
        return float(matched)

    def scores(self, logits: Tensor) -> Tensor:
        """Takes logits (…, K + 1) and returns class probabilities (…, K)."""
        return logits[..., :-1].sigmoid()

    def matching_cost(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Takes logits (…, K + 1) and classes (…, T). Returns the costs (…, T).

        The cost of a class is its focal loss if it is the true class, minus its focal loss if it is
        not. Targets are 1 and 0.
        """
        logits = logits.gather(-1, labels)  # (…, T)
        p = logits.sigmoid()
        loss_if_true = -self.alpha * (1 - p).pow(self.gamma) * F.logsigmoid(logits)
        loss_if_false = -(1 - self.alpha) * p.pow(self.gamma) * F.logsigmoid(-logits)
        return loss_if_true - loss_if_false


class SetCriterion(nn.Module):
    """Matches predictions to ground truth, and computes weighted class, L1 and GIoU losses."""

    def __init__(
        self,
        *,
        num_classes: int,
        classification: SoftmaxClassification | FocalClassification | None = None,
        class_weight: float = 1.0,
        l1_weight: float = 5.0,
        giou_weight: float = 2.0,
    ) -> None:
        """
        Args:
            num_classes: K, without the no-object class.
            classification: classification loss, ``SoftmaxClassification`` by default.
            class_weight: weight of the classification loss and of its matching cost.
            l1_weight: weight of the L1 distance of cxcywh boxes.
            giou_weight: weight of 1 - GIoU.

        Raises:
            ValueError: all weights are zero.
        """
        super().__init__()
        has_weight = bool(class_weight or l1_weight or giou_weight)
        check_value(has_weight, "MF_DETR.CLASS_WEIGHT", 0, "above 0 where the others are zero")
        self.num_classes = num_classes
        self.classification = classification or SoftmaxClassification()
        self.class_weight = class_weight
        self.l1_weight = l1_weight
        self.giou_weight = giou_weight

    def forward(
        self, outputs: dict[str, Tensor], targets: Targets, normalizers: Tensor
    ) -> dict[str, Tensor]:
        """Returns the weighted losses "loss_ce", "loss_bbox" and "loss_giou" of the last block.

        The losses of the other blocks have the suffix "_0", "_1", and so on.

        Args:
            outputs: predictions of L blocks: "pred_logits" (L, N, Q, K + 1) and "pred_boxes" (L, N,
                Q, 4), cxcywh in [0, 1] of the unpadded image.
            targets: ground truth of the N images.
            normalizers: (2,), divisors from ``mean_normalizers`` for the effective batch.
        """
        logits = outputs["pred_logits"].float()
        boxes = outputs["pred_boxes"].float()
        matches = self.match(logits, boxes, targets)
        block_losses = self.block_losses(logits, boxes, targets, normalizers, matches)
        losses = {}
        last = len(logits) - 1
        for block in range(len(logits)):
            suffix = "" if block == last else f"_{block}"
            for name, loss in block_losses.items():
                losses[f"{name}{suffix}"] = loss[block]
        return losses

    @torch.no_grad()
    def match(self, logits: Tensor, boxes: Tensor, targets: Targets) -> Matches:
        """Assigns boxes to queries with the least total cost of class, L1 distance and -GIoU.

        Takes logits (L, N, Q, K + 1) and boxes (L, N, Q, 4). Returns min(Q, T_i) matches for each
        block and image i, sorted by block, image and query.
        """
        from scipy.optimize import linear_sum_assignment  # half a second, in training only

        costs = self.matching_cost(logits.float(), boxes.float(), targets).cpu().numpy()
        num_blocks, num_images = costs.shape[:2]
        # Each column is a match: block, image, query, target.
        columns = [np.empty((4, 0), dtype=np.int64)]
        for block in range(num_blocks):
            for image in range(num_images):
                num_boxes = targets.counts[image]
                cost = costs[block, image, :, :num_boxes]  # (Q, T_i), without padding
                query, target = linear_sum_assignment(cost)
                block_index = np.full_like(query, block)
                image_index = np.full_like(query, image)
                columns.append(np.stack([block_index, image_index, query, target]))
        index = torch.from_numpy(np.concatenate(columns, axis=1))
        return Matches(*index.to(boxes.device, non_blocking=True))

    def matching_cost(self, logits: Tensor, boxes: Tensor, targets: Targets) -> Tensor:
        """Returns the cost of each pair of a query and a target, (L, N, Q, T).

        Takes logits (L, N, Q, K + 1) and boxes (L, N, Q, 4). Columns beyond an image's number of
        boxes are padding.
        """
        labels = targets.labels[None, :, None].expand(*logits.shape[:3], -1)  # (L, N, Q, T)
        true_boxes = targets.boxes[None].expand(len(boxes), -1, -1, -1)  # (L, N, T, 4)
        distance = torch.cdist(boxes, true_boxes, p=1)  # (L, N, Q, T)
        predicted = box_convert(boxes, "cxcywh", "xyxy")
        true = box_convert(targets.boxes, "cxcywh", "xyxy")
        # For each image (inner vmap) of each block (outer vmap). All blocks have the same targets.
        pairwise_giou = torch.vmap(torch.vmap(generalized_box_iou), in_dims=(0, None))
        cost = (
            self.l1_weight * distance
            + self.class_weight * self.classification.matching_cost(logits, labels)
            - self.giou_weight * pairwise_giou(predicted, true)
        )
        # NaN would crash the solver. The trainer reports diverged models by checking the loss.
        return cost.nan_to_num(nan=1e6, posinf=1e6, neginf=-1e6)

    def block_losses(
        self,
        logits: Tensor,
        boxes: Tensor,
        targets: Targets,
        normalizers: Tensor,
        matches: Matches,
    ) -> dict[str, Tensor]:
        """Returns weighted losses (L,) per block: "loss_ce", "loss_bbox" and "loss_giou".

        Args:
            logits: (L, N, Q, K + 1), float32.
            boxes: (L, N, Q, 4), float32, cxcywh in [0, 1] of the unpadded image.
            targets: ground truth of the N images.
            normalizers: (2,), divisors of the class loss and of the box losses.
            matches: the P matched queries, and the target of each.
        """
        class_normalizer, box_normalizer = normalizers
        matched_queries = (matches.block, matches.image, matches.query)
        predicted_boxes = boxes[matched_queries]  # (P, 4)
        true_boxes = targets.boxes[matches.image, matches.target]  # (P, 4)

        # (L, N, Q), the class and the IoU of the matched box. Without a match, K and 0.
        classes = torch.full(logits.shape[:3], self.num_classes, device=logits.device)
        classes[matched_queries] = targets.labels[matches.image, matches.target]
        quality = boxes.new_zeros(classes.shape)
        if self.classification.reads_quality:
            overlaps = _paired_overlap(box_iou, predicted_boxes.detach(), true_boxes)
            quality[matched_queries] = overlaps
        logits = ignore_unannotated(logits, targets.is_annotated, classes)
        class_losses = self.classification.loss(logits, classes, quality)  # (L, N, Q)
        l1_losses = (predicted_boxes - true_boxes).abs().sum(dim=-1)  # (P,)
        giou_losses = 1 - _paired_overlap(generalized_box_iou, predicted_boxes, true_boxes)  # (P,)

        class_sums = class_losses.sum(dim=(1, 2))  # (L,)
        zeros = boxes.new_zeros(len(boxes))
        l1_sums = zeros.index_add(0, matches.block, l1_losses)
        giou_sums = zeros.index_add(0, matches.block, giou_losses)
        return {
            "loss_ce": self.class_weight * class_sums / class_normalizer,
            "loss_bbox": l1_sums * (self.l1_weight / box_normalizer),
            "loss_giou": giou_sums * (self.giou_weight / box_normalizer),
        }

    def normalizers(self, counts: Sequence[int], num_queries: int) -> tuple[float, float]:
        """Returns the divisor of the class loss and the divisor of the box losses.

        They are the same for all decoder blocks. ``counts`` are the numbers of boxes per image.
        """
        num_matched = sum(min(count, num_queries) for count in counts)
        num_unmatched = len(counts) * num_queries - num_matched
        class_normalizer = self.classification.normalizer(num_matched, num_unmatched)
        box_normalizer = float(sum(counts))
        return class_normalizer, box_normalizer

    def mean_normalizers(self, totals: Tensor, parts: int) -> Tensor:
        """Takes the sums (…, 2) of ``normalizers`` over ``parts`` batches. Returns their means.

        Lower bounds of the sums prevent a division by 0.
        """
        lower_bounds = torch.tensor([self.classification.least_normalizer, 1e-6])
        lower_bounds = lower_bounds.to(totals.device, non_blocking=True)
        return totals.maximum(lower_bounds) / parts


def _paired_overlap(overlap: Callable[..., Tensor], first: Tensor, second: Tensor) -> Tensor:
    """Returns the overlap of each of P pairs of boxes, (P,).

    ``overlap`` computes the overlaps (A, B) of A and B boxes, XYXY, such as ``box_iou``. ``first``
    and ``second`` are (P, 4), cxcywh.
    """
    first = box_convert(first, "cxcywh", "xyxy")[:, None]  # (P, 1, 4)
    second = box_convert(second, "cxcywh", "xyxy")[:, None]
    overlaps = torch.vmap(overlap)(first, second)  # (P, 1, 1)
    return overlaps[:, 0, 0]
