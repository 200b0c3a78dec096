# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Losses with which a dense detector keeps its old classes while it learns new ones.

Images of the new classes have no labels of the old ones, although such objects are there. A frozen
copy of the detector before the training, the old detector, predicts on the same images. Its scores
are the targets of the old classes that are not annotated in an image, at all anchors or locations,
without NMS or score threshold ("Learning without Forgetting", arXiv:1606.09282, with the quality
focal loss for each logit). Its boxes are learned where it is confident.

The model has the old classes first, in the order of the old detector. In shapes, N is the number of
images, R the number of anchors or locations of all levels, and O the number of old classes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from detectron2.config import CfgNode
from torch import Tensor
from torch.nn import functional as F
from torchvision.ops import generalized_box_iou_loss

from qbheat_det.config import configurable

from .annotated_classes import find_annotated
from .contracts import OLD_PREDICTIONS, get_encoder
from .dense_predictions import DenseLevels, DensePredictions
from .loss_normalizer import COUNT, SyncNormalizer
from .losses import quality_focal_loss


class OldPredictions(NamedTuple):
    """The old detector's predictions for one image, or stacked for N images.

    Attributes:
        scores: (N, R, O), class scores.
        boxes: (N, R, 4), XYXY, in pixels of the padded batch.
        quality: (N, R), centerness; None for RetinaNet.
        features: (N, C, H_i, W_i) of each level, which the head reads; empty if they are not used.
    """

    scores: Tensor
    boxes: Tensor
    quality: Tensor | None
    features: Sequence[Tensor]

    @staticmethod
    def stack(images: Sequence["OldPredictions"]) -> "OldPredictions":
        """Stacks the predictions for single images."""
        quality = [image.quality for image in images if image.quality is not None]
        levels = zip(*(image.features for image in images), strict=True)
        return OldPredictions(
            scores=torch.stack([image.scores for image in images]),
            boxes=torch.stack([image.boxes for image in images]),
            quality=torch.stack(quality) if quality else None,
            features=[torch.stack(level) for level in levels],
        )


@dataclass(frozen=True)
class KeptClassLoss:
    """The losses towards the old detector's predictions, as sums over images.

    They are 0 if the model predicts what the old detector does.

    Attributes:
        num_classes: O. With 0, there is no old detector.
        weight: factor on the losses of scores and boxes.
        min_score: boxes are learned where the old detector has at least this score in a class that
            is not annotated.
        feature_weight: factor on the loss of features, which keeps those of a trained encoder.
        gamma: exponent of the quality focal loss of scores. With 2, as for labels, old classes are
            kept less well, and new ones are learned better (docs/growing.md).
    """

    num_classes: int = 0
    weight: float = 1.0
    min_score: float = 0.3
    feature_weight: float = 0.0
    gamma: float = 1.0

    @classmethod
    def from_config(cls, cfg: CfgNode) -> "KeptClassLoss":
        """Reads ``MODEL.KEEP_CLASSES`` of a config."""
        node = cfg.MODEL.KEEP_CLASSES
        return cls(node.NUM, node.WEIGHT, node.MIN_SCORE, node.FEATURE_WEIGHT)

    def weigh(self, old: OldPredictions, is_taught: Tensor, is_positive: Tensor) -> Tensor:
        """Returns the weights of boxes, (N, R): the old detector's highest score where it counts.

        The weight is 0 where this score is below ``min_score``, and where a labelled object is.

        Args:
            old: the old detector's predictions for N images.
            is_taught: (N, O), True where a class learns from the old detector.
            is_positive: (N, R), True where a labelled object is learned.
        """
        best = (old.scores * is_taught[:, None]).amax(dim=2)
        return best.where((best >= self.min_score) & ~is_positive, 0)

    def __call__(
        self,
        student: DensePredictions,
        features: Sequence[Tensor],
        old: OldPredictions,
        is_taught: Tensor,
        weights: Tensor,
    ) -> dict[str, Tensor]:
        """Returns the losses by name, as sums over images.

        Args:
            student: the trained model's predictions for N images.
            features: the maps that its head reads, (N, C, H_i, W_i) of each level. An empty list
                leaves out the loss of features.
            old: the old detector's predictions for the same images.
            is_taught: (N, O), True where a class learns from the old detector.
            weights: (N, R), the result of ``weigh``.
        """
        logits = student.logits[..., : self.num_classes].float()
        class_losses = quality_focal_loss(logits, old.scores, self.gamma) * is_taught[:, None]
        losses = {"loss_kept_cls": self.weight * class_losses.sum()}
        selected = weights > 0
        box_losses = generalized_box_iou_loss(student.boxes.float()[selected], old.boxes[selected])
        losses["loss_kept_box"] = self.weight * (weights[selected] * box_losses).sum()
        if student.quality is not None and old.quality is not None:
            quality_losses = F.binary_cross_entropy_with_logits(
                student.quality.float()[selected], old.quality[selected], reduction="none"
            )
            losses["loss_kept_ctr"] = self.weight * (weights[selected] * quality_losses).sum()
        if features:
            total = logits.new_zeros(())
            for level, old_level in zip(features, old.features, strict=True):
                total = total + (level.float() - old_level).square().mean(dim=1).sum()
            losses["loss_kept_features"] = self.feature_weight * total
        return losses


class KeepsClasses(SyncNormalizer):
    """Mixin of RetinaNet and FCOS, which can keep the classes of an old detector.

    What the old detector finds counts as positive in the divisor of all losses, as its labels
    would. So old and new objects have the weights of a training on labels of both.
    """

    @configurable
    def __init__(self, *, kept_class_loss: KeptClassLoss | None = None, **kwargs: Any) -> None:
        """Takes the detector's arguments, and the losses towards the old detector."""
        super().__init__(**kwargs)
        self.kept_class_loss = kept_class_loss or KeptClassLoss()
        encoder = get_encoder(self.backbone)
        is_trained = any(parameter.requires_grad for parameter in encoder.parameters())
        self.keeps_features = is_trained and self.kept_class_loss.feature_weight > 0

    @torch.no_grad()
    def predict_old(self, batched_inputs: list[dict[str, Any]]) -> list[OldPredictions]:
        """Returns the ``OLD_PREDICTIONS`` of each image. Called on the old detector."""
        levels = self.predict_levels(batched_inputs)
        predictions = levels.decode(self.box2box_transform)
        num_kept = self.kept_class_loss.num_classes
        scores = predictions.logits[..., :num_kept].float().sigmoid()
        features: list[Tensor] = []
        if self.keeps_features:
            features = [level.float() for level in levels.features]
        images = []
        for index in range(len(scores)):
            quality = None
            if predictions.quality is not None:
                quality = predictions.quality[index].float().sigmoid()
            images.append(
                OldPredictions(
                    scores=scores[index],
                    boxes=predictions.boxes[index].float(),
                    quality=quality,
                    features=[level[index] for level in features],
                )
            )
        return images

    def sum_losses(
        self,
        batched_inputs: list[dict[str, Any]],
        levels: DenseLevels,
        gt_labels: list[Tensor],
        gt_boxes: Any,
    ) -> dict[str, Tensor]:
        """Returns the sums of the losses on labels and on the old detector's predictions."""
        sums = super().sum_losses(batched_inputs, levels, gt_labels, gt_boxes)
        if not self.kept_class_loss.num_classes:
            return sums
        old, is_taught, weights = self._weigh_old(batched_inputs, gt_labels)
        student = levels.decode(self.box2box_transform)
        features = levels.features if self.keeps_features else []
        losses = self.kept_class_loss(student, features, old, is_taught, weights)
        return {**sums, **losses, COUNT: sums[COUNT] + weights.sum()}

    def count_batch(self, batched_inputs: list[dict[str, Any]], gt_labels: list[Tensor]) -> Tensor:
        """Returns the number (1,) of positives in a batch, with those of the old detector."""
        count = super().count_batch(batched_inputs, gt_labels)
        if not self.kept_class_loss.num_classes:
            return count
        _, _, weights = self._weigh_old(batched_inputs, gt_labels)
        return count + weights.sum()

    def _weigh_old(
        self, batched_inputs: list[dict[str, Any]], gt_labels: list[Tensor]
    ) -> tuple[OldPredictions, Tensor, Tensor]:
        """Returns the old detector's predictions, and ``is_taught`` and the result of ``weigh``."""
        old = OldPredictions.stack([entry[OLD_PREDICTIONS] for entry in batched_inputs])
        num_kept = self.kept_class_loss.num_classes
        is_annotated = find_annotated(batched_inputs, self.num_classes, self.device)
        if is_annotated is None:
            size = (len(batched_inputs), num_kept)
            is_taught = torch.zeros(size, dtype=torch.bool, device=self.device)
        else:
            is_taught = ~is_annotated[:, :num_kept]
        weights = self.kept_class_loss.weigh(old, is_taught, self.find_positives(gt_labels))
        return old, is_taught, weights
