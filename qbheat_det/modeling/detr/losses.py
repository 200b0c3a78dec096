# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Classification in MF-DETR: loss in training, cost in matching, scores in inference.

Papers: DETR, arXiv:2005.12872, for the softmax; focal loss, arXiv:1708.02002; generalized focal
loss, arXiv:2006.04388, whose target is the IoU; Deformable DETR, arXiv:2010.04159, for matching
under a focal loss. Deviation: targets may follow the IoU in part (``iou_target``), with the balance
alpha of the plain loss.
"""

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor
from torch.nn import functional as F


class ClassificationLoss(ABC):
    """A loss of logits (…, K + 1), of which the last is the no-object class.

    ``initial_bias`` initialises the biases of the logits; a sum over an effective batch is divided
    by ``least_normalizer`` or more; ``reads_quality`` is whether ``loss`` uses the IoU.
    """

    name: str
    """In ``MODEL.MF_DETR.CLASSIFICATION``."""

    initial_bias: float = 0.0
    least_normalizer: float = 1.0
    reads_quality: bool = True

    @abstractmethod
    def loss(self, logits: Tensor, wanted: Tensor, quality: Tensor) -> Tensor:
        """Returns (N, …), the loss of each query, before division by ``normalizer``.

        Args:
            logits: (N, …, K + 1), float32.
            wanted: (N, …), classes in [0, K], where K is "no object".
            quality: (N, …), IoU of a query's box with the one it is matched to, without gradient;
                ignored where K is wanted, and unless ``reads_quality``.
        """

    @abstractmethod
    def normalizer(self, matched: int, unmatched: int) -> float:
        """Returns the divisor of a sum over so many queries of a whole batch."""

    @abstractmethod
    def scores(self, logits: Tensor) -> Tensor:
        """From logits (…, K + 1) to probabilities of the classes (…, K)."""

    def matching_cost(self, logits: Tensor, labels: Tensor) -> Tensor:
        """From logits (…, K + 1) and classes (…, T) to (…, T), the loss if wanted, shifted."""
        # -p stands for 1 - p.
        return -self.scores(logits).gather(-1, labels)


class SoftmaxClassification(ClassificationLoss):
    """DETR's: a softmax over K + 1 classes, with a smaller weight of no-object."""

    name = "softmax"
    least_normalizer = 1e-6  # the divisor is 0 only if the sum is
    reads_quality = False

    def __init__(self, *, no_object_weight: float = 0.1) -> None:
        """Takes the weight of queries without a box."""
        self.no_object_weight = no_object_weight

    def loss(self, logits: Tensor, wanted: Tensor, quality: Tensor) -> Tensor:
        weight = logits.new_ones(logits.shape[-1])
        weight[-1] = self.no_object_weight
        return F.cross_entropy(logits.movedim(-1, 1), wanted, weight, reduction="none")

    def normalizer(self, matched: int, unmatched: int) -> float:
        return matched + self.no_object_weight * unmatched

    def scores(self, logits: Tensor) -> Tensor:
        return logits.softmax(dim=-1)[..., :-1]


class FocalClassification(ClassificationLoss):
    """A sigmoid for each class; the last of the K + 1 logits is not used.

    The loss of a class is its binary cross-entropy with the target t, weighted by
    abs(t - p)^gamma and by alpha for the wanted class, 1 - alpha for others. With
    ``iou_target`` 0 this is RetinaNet's focal loss, with 1 the quality focal loss.
    """

    name = "focal"

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
            alpha: weight of the wanted class; 1 - alpha of the others.
            iou_target: share of the IoU in the target of a match; with 0 the target is 1.
            prior: probability of each class before training.

        Raises:
            ValueError: a number is out of its range.
        """
        keys = "MODEL.MF_DETR.FOCAL."
        if gamma < 0 or 0 < gamma < 1:
            raise ValueError(
                f"{keys}GAMMA is 0 or at least 1, not {gamma}: between them, the gradient "
                "diverges where a prediction equals its target"
            )
        if not (0 <= alpha <= 1 and 0 <= iou_target <= 1 and 0 < prior < 1):
            raise ValueError(
                f"{keys}ALPHA ({alpha}) and IOU_TARGET ({iou_target}) are in [0, 1], and PRIOR "
                f"({prior}) is between 0 and 1"
            )
        self.gamma = gamma
        self.alpha = alpha
        self.iou_target = iou_target
        self.initial_bias = -math.log((1 - prior) / prior)

    def loss(self, logits: Tensor, wanted: Tensor, quality: Tensor) -> Tensor:
        logits = logits[..., :-1]
        is_wanted = wanted[..., None] == torch.arange(logits.shape[-1], device=logits.device)
        target = (1 - self.iou_target * (1 - quality))[..., None] * is_wanted
        entropy = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
        balance = self.alpha * is_wanted + (1 - self.alpha) * ~is_wanted
        distance = (target - logits.sigmoid()).abs()
        return (balance * distance.pow(self.gamma) * entropy).sum(dim=-1)

    def normalizer(self, matched: int, unmatched: int) -> float:
        return float(matched)

    def scores(self, logits: Tensor) -> Tensor:
        return logits[..., :-1].sigmoid()

    def matching_cost(self, logits: Tensor, labels: Tensor) -> Tensor:
        """See ``ClassificationLoss.matching_cost``: the focal loss if wanted minus if not."""
        logits = logits.gather(-1, labels)
        p = logits.sigmoid()
        wanted = -self.alpha * (1 - p).pow(self.gamma) * F.logsigmoid(logits)
        unwanted = -(1 - self.alpha) * p.pow(self.gamma) * F.logsigmoid(-logits)
        return wanted - unwanted
