# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Losses of dense detectors on unlabelled images: dense pseudo-labels.

Paper: "Dense Teacher: Dense Pseudo-Labels for Semi-supervised Object Detection", arXiv:2207.02541.
A detector (the student) learns from the scores and boxes that the mean teacher predicts at selected
locations, without NMS or score threshold. The weights of the mean teacher are the moving average of
the student's weights. The mean teacher sees the weak view of an image, and the student sees the
strong view.

In shapes, R is the number of anchors or locations of all levels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.utils import comm
from torch import Tensor
from torch.nn import functional as F
from torchvision.ops import generalized_box_iou_loss

from qbheat_det.config import configurable

from .contracts import PSEUDO_LABELS, STRONG, UNLABELLED
from .dense_predictions import DensePredictions
from .loss_normalizer import SyncNormalizer
from .losses import quality_focal_loss


@dataclass(frozen=True)
class DensePseudoLabels:
    """Targets of the student, from the mean teacher, at R anchors or locations of N images.

    Attributes:
        scores: (N, R, K), the mean teacher's class scores at the selected locations; zero
            elsewhere.
        boxes: (N, R, 4), the mean teacher's boxes, XYXY, in pixels of the padded batch.
        total: (N,), the divisor of the losses, the same for each image. It is the sum of the
            highest class scores of all selected locations of all processes, divided by the number
            of micro-batches of all processes.
        quality: (N, R), the mean teacher's centerness; None for RetinaNet.
    """

    scores: Tensor
    boxes: Tensor
    total: Tensor
    quality: Tensor | None = None

    def split(self) -> list["DensePseudoLabels"]:
        """Returns the pseudo-labels of each image, with N = 1."""
        images = []
        for index in range(len(self.scores)):
            row = slice(index, index + 1)
            images.append(
                DensePseudoLabels(
                    scores=self.scores[row],
                    boxes=self.boxes[row],
                    total=self.total[row],
                    quality=None if self.quality is None else self.quality[row],
                )
            )
        return images

    @staticmethod
    def join(images: list["DensePseudoLabels"]) -> "DensePseudoLabels":
        """Concatenates the pseudo-labels of images, which ``split`` returns."""
        quality = [image.quality for image in images if image.quality is not None]
        return DensePseudoLabels(
            scores=torch.cat([image.scores for image in images]),
            boxes=torch.cat([image.boxes for image in images]),
            total=torch.cat([image.total for image in images]),
            quality=torch.cat(quality) if quality else None,
        )


@dataclass(frozen=True)
class DensePseudoLabelLoss:
    """Selects pseudo-labels, and computes the losses of the student (Sec. 3 of the paper).

    Attributes:
        top_ratio: number of selected locations in the unlabelled images of a step, relative to the
            running mean of the number of positive locations in the labelled images of a step. The
            locations with the mean teacher's highest class scores are selected. The targets of all
            other locations are zero. The paper selects 1 % of all locations. In small images with
            many objects, this is too few.
        weight: factor on the losses.
        gamma: exponent of the quality focal loss (arXiv:2006.04388).
    """

    top_ratio: float = 2.0
    weight: float = 1.0
    gamma: float = 2.0

    @classmethod
    def from_config(cls, cfg: CfgNode) -> "DensePseudoLabelLoss":
        """Reads ``MODEL.SEMI`` of a config."""
        semi = cfg.MODEL.SEMI
        return cls(top_ratio=semi.TOP_RATIO * semi.RATIO, weight=semi.WEIGHT)

    @torch.no_grad()
    def select(
        self, predictions: Sequence[DensePredictions], num_positives: float
    ) -> list[DensePseudoLabels]:
        """Returns the pseudo-labels of each image. Every process must call this function.

        Args:
            predictions: the mean teacher's predictions for each micro-batch of this process.
            num_positives: running mean of the number of positive locations in the labelled images
                of a step.
        """
        num_processes = comm.get_world_size()
        scores = [part.logits.float().sigmoid() for part in predictions]  # (N, R, K) each
        # The highest class score at each location of all micro-batches.
        best_scores = torch.cat([part_scores.amax(dim=2).flatten() for part_scores in scores])

        # The threshold is the lowest of the ``num_selected`` highest scores of all processes.
        num_selected = max(1, round(self.top_ratio * num_positives))
        top_scores = best_scores.topk(min(num_selected, len(best_scores))).values
        if num_processes > 1:
            top_scores = torch.cat(comm.all_gather(top_scores.cpu())).to(best_scores.device)
        threshold = top_scores.topk(min(num_selected, len(top_scores))).values[-1]

        total = best_scores.where(best_scores >= threshold, 0).sum()
        if num_processes > 1:
            torch.distributed.all_reduce(total)
        total /= len(predictions) * num_processes

        pseudo_labels = []
        for part, part_scores in zip(predictions, scores, strict=True):
            is_selected = part_scores.amax(dim=2, keepdim=True) >= threshold
            labels = DensePseudoLabels(
                scores=part_scores * is_selected,
                boxes=part.boxes.float(),
                total=total.expand(len(part_scores)),
                quality=None if part.quality is None else part.quality.float().sigmoid(),
            )
            pseudo_labels += labels.split()
        return pseudo_labels

    def __call__(self, student: DensePredictions, labels: DensePseudoLabels) -> dict[str, Tensor]:
        """Returns the student's losses on a micro-batch by name.

        The losses of a step are their means over the micro-batches of all processes.
        """
        best_scores = labels.scores.amax(dim=2)
        total = labels.total[0]
        class_loss = quality_focal_loss(student.logits.float(), labels.scores, self.gamma)
        losses = {"loss_pseudo_cls": class_loss.sum() / total}
        # Each selected location is weighted by its highest class score.
        selected = best_scores > 0  # (N, R)
        weights = best_scores[selected] / total
        giou_loss = generalized_box_iou_loss(
            student.boxes.float()[selected], labels.boxes[selected]
        )
        losses["loss_pseudo_box"] = (weights * giou_loss).sum()
        if student.quality is not None and labels.quality is not None:
            quality_loss = F.binary_cross_entropy_with_logits(
                student.quality.float()[selected], labels.quality[selected], reduction="none"
            )
            losses["loss_pseudo_ctr"] = (weights * quality_loss).sum()
        return {name: self.weight * loss for name, loss in losses.items()}


class SemiSupervisedDetector(SyncNormalizer):
    """Mixin of RetinaNet and FCOS, which also learn from the unlabelled images of a batch."""

    @configurable
    def __init__(
        self, *, pseudo_label_loss: DensePseudoLabelLoss | None = None, **kwargs: Any
    ) -> None:
        """Takes the detector's arguments, and the losses on unlabelled images."""
        super().__init__(**kwargs)
        self.pseudo_label_loss = pseudo_label_loss or DensePseudoLabelLoss()

    def forward(
        self, batched_inputs: list[dict[str, Any]], normalizers: Tensor | None = None
    ) -> Any:
        """Returns losses in training, and detections in evaluation.

        The losses include those on the unlabelled images of the inputs. ``normalizers`` (1,) is the
        divisor of the losses on labelled images. By default, it is computed from the batches of all
        processes.
        """
        outputs = super().forward(batched_inputs, normalizers)
        if not self.training:
            return outputs
        unlabelled: list[dict[str, Any]] = []
        for entry in batched_inputs:
            unlabelled.extend(entry.get(UNLABELLED, ()))
        if not unlabelled:
            return outputs
        return {**outputs, **self.unlabelled_losses(unlabelled)}

    def unlabelled_losses(self, unlabelled: list[dict[str, Any]]) -> dict[str, Tensor]:
        """Returns the losses on the strong views of unlabelled images with ``PSEUDO_LABELS``."""
        key = "features" if "features" in unlabelled[0] else "image"
        strong_views = [{**entry, key: entry[STRONG]} for entry in unlabelled]
        labels = DensePseudoLabels.join([entry[PSEUDO_LABELS] for entry in unlabelled])
        return self.pseudo_label_loss(self.predict_densely(strong_views), labels)

    @torch.no_grad()
    def pseudo_labels(self, batches: Sequence[list[dict[str, Any]]]) -> list[DensePseudoLabels]:
        """Returns the pseudo-labels of each unlabelled image. Called on the mean teacher.

        ``batches`` are the micro-batches of this process. Every process must call this function.
        """
        predictions = [self.predict_densely(batch) for batch in batches]
        return self.pseudo_label_loss.select(predictions, float(self.loss_normalizer))

    def predict_densely(self, batched_inputs: list[dict[str, Any]]) -> DensePredictions:
        """Returns the predictions at all locations, before score threshold and NMS."""
        return self.predict_levels(batched_inputs).decode(self.box2box_transform)
