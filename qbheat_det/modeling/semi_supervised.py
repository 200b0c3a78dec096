# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Dense Teacher: a detector learns from a teacher's dense scores on unlabelled images.

Paper: arXiv:2207.02541. There are no pseudo-boxes, no NMS and no score threshold. The teacher is
the moving average of the weights. It sees the weak view of an image, the student the strong view.
"""

from dataclasses import dataclass
from typing import Any

import torch
from detectron2.structures import Boxes
from torch import Tensor
from torch.nn import functional as F
from torchvision.ops import generalized_box_iou_loss


@dataclass(frozen=True)
class DensePredictions:
    """Predictions of a dense detector at R anchors or locations of N images.

    Attributes:
        logits: (N, R, K), of a sigmoid for each class.
        boxes: (N, R, 4), XYXY, in pixels of the padded batch.
        quality: (N, R), logits of the centerness; None for RetinaNet.
    """

    logits: Tensor
    boxes: Tensor
    quality: Tensor | None = None

    def split(self) -> list["DensePredictions"]:
        """Returns the predictions of each image, with N = 1."""
        qualities = [None] * len(self.logits) if self.quality is None else self.quality.split(1)
        parts = zip(self.logits.split(1), self.boxes.split(1), qualities, strict=True)
        return [DensePredictions(*part) for part in parts]

    @staticmethod
    def join(parts: list["DensePredictions"]) -> "DensePredictions":
        """Reverses ``split``."""
        qualities = [part.quality for part in parts if part.quality is not None]
        return DensePredictions(
            torch.cat([part.logits for part in parts]),
            torch.cat([part.boxes for part in parts]),
            torch.cat(qualities) if qualities else None,
        )


@dataclass(frozen=True)
class DenseTeacherLoss:
    """The losses on unlabelled images (Sec. 3 of the paper).

    Attributes:
        top_share: share of all locations of a batch that learn from the teacher, in (0, 1]: those
            with the highest class scores. All others learn the score zero.
        weight: factor on the losses.
        gamma: exponent of the quality focal loss (arXiv:2006.04388).
    """

    top_share: float = 0.01
    weight: float = 1.0
    gamma: float = 2.0

    def __call__(self, student: DensePredictions, teacher: DensePredictions) -> dict[str, Tensor]:
        """Returns the losses by name; ``teacher`` has no gradients."""
        num_classes = student.logits.shape[-1]
        logits = student.logits.float().reshape(-1, num_classes)
        targets = teacher.logits.float().reshape(-1, num_classes).sigmoid()
        best = targets.amax(dim=1)
        top = best.topk(max(1, int(self.top_share * len(best)))).indices
        targets = torch.zeros_like(targets).index_copy(0, top, targets[top])
        total = best[top].sum()
        bce = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
        distance = (targets - logits.sigmoid()).abs() ** self.gamma
        losses = {"loss_teacher_cls": (distance * bce).sum() / total}
        # A location counts as much as the teacher is certain of it.
        weights = best[top] / total
        boxes = student.boxes.float().reshape(-1, 4)[top]
        giou = generalized_box_iou_loss(boxes, teacher.boxes.float().reshape(-1, 4)[top])
        losses["loss_teacher_box"] = (weights * giou).sum()
        if student.quality is not None and teacher.quality is not None:
            quality = F.binary_cross_entropy_with_logits(
                student.quality.float().flatten()[top],
                teacher.quality.float().flatten()[top].sigmoid(),
                reduction="none",
            )
            losses["loss_teacher_ctr"] = (weights * quality).sum()
        return {name: self.weight * loss for name, loss in losses.items()}


def decode_boxes(transform: Any, anchors: list[Boxes], deltas: list[Tensor]) -> Tensor:
    """Returns (N, R, 4) from the deltas (N, R_l, 4) of each level, by Detectron2's transform."""
    every = Boxes.cat(anchors).tensor
    images = torch.cat(deltas, dim=1)
    return torch.stack([transform.apply_deltas(image, every) for image in images])
