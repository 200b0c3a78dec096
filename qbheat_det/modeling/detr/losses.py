# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Classification in MF-DETR: loss in training, cost in matching, scores in inference.

Papers: DETR, arXiv:2005.12872, for the softmax; focal loss, arXiv:1708.02002; generalized focal
loss, arXiv:2006.04388, whose target is the IoU; VarifocalNet, arXiv:2008.13367; Deformable DETR,
arXiv:2010.04159, for matching under a focal loss. Deviations: targets may follow the IoU in part
(``FocalSettings.iou_target``), with the balance alpha of the plain loss; the same idea within a
softmax (``SoftmaxFocalClassification``) is this package's.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


class ClassificationLoss(ABC):
    """A loss of logits (…, K + 1), of which the last is the no-object class.

    ``initial_bias`` initialises the biases of the logits; a sum over an effective batch is divided
    by ``least_normalizer`` or more; ``reads_quality`` is whether ``loss`` uses the IoU;
    ``same_scores`` names all losses with the same ``scores``.
    """

    initial_bias: float = 0.0
    least_normalizer: float = 1.0
    reads_quality: bool = True
    same_scores: tuple[str, ...] = ()

    @abstractmethod
    def loss(self, logits: Tensor, wanted: Tensor, quality: Tensor) -> Tensor:
        """
        Args:
            logits: (N, …, K + 1), float32.
            wanted: (N, …), classes in [0, K], where K is "no object".
            quality: (N, …), IoU in [0, 1] of a query's box with the one it is matched to, without
                gradient; ignored where K is wanted, and unless ``reads_quality``.

        Returns:
            (N, …), the loss of each query, before division by ``normalizer``.
        """

    @abstractmethod
    def normalizer(self, matched: int, unmatched: int) -> float:
        """Returns the divisor of a sum over so many queries of a whole batch."""

    @abstractmethod
    def scores(self, logits: Tensor) -> Tensor:
        """From logits (…, K + 1) to probabilities of the classes (…, K)."""

    def matching_cost(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Returns (…, T), the loss if these classes were wanted, up to a constant.

        Args:
            logits: (…, K + 1), float32.
            labels: (…, T), classes in [0, K).
        """
        # -p stands for 1 - p.
        return -self.scores(logits).gather(-1, labels)


class SoftmaxClassification(ClassificationLoss):
    """DETR's: a softmax over K + 1 classes, with a smaller weight of no-object."""

    least_normalizer = 1e-6  # the divisor is 0 only if the sum is
    reads_quality = False
    same_scores = ("softmax", "softmax_focal")

    def __init__(self, *, no_object_weight: float = 0.1) -> None:
        """Takes the weight of queries without a box."""
        self.no_object_weight = no_object_weight

    def loss(self, logits: Tensor, wanted: Tensor, quality: Tensor) -> Tensor:
        """See ``ClassificationLoss.loss``: weighted cross-entropy."""
        weight = logits.new_ones(logits.shape[-1])
        weight[-1] = self.no_object_weight
        return F.cross_entropy(logits.movedim(-1, 1), wanted, weight, reduction="none")

    def normalizer(self, matched: int, unmatched: int) -> float:
        """See ``ClassificationLoss.normalizer``: the sum of all queries' weights."""
        return matched + self.no_object_weight * unmatched

    def scores(self, logits: Tensor) -> Tensor:
        """See ``ClassificationLoss.scores``; no-object takes part in the softmax."""
        return logits.softmax(dim=-1)[..., :-1]


@dataclass(frozen=True)
class FocalSettings:
    """Settings of the focal losses."""

    gamma: float = 2.0  # exponent of the distance between target and prediction
    alpha: float = 0.25  # weight of the wanted class; 1 - alpha of the others
    iou_target: float = 1.0  # share of the IoU in the target of a match; with 0 it is 1
    prior: float = 0.01  # probability of each class before training, with sigmoids

    def __post_init__(self) -> None:
        keys = "MODEL.MF_DETR.FOCAL."
        if self.gamma < 0 or 0 < self.gamma < 1:
            raise ValueError(
                f"{keys}GAMMA is 0 or at least 1, not {self.gamma}: between them, the gradient "
                "diverges where a prediction equals its target"
            )
        for name, value in {"ALPHA": self.alpha, "IOU_TARGET": self.iou_target}.items():
            if not 0 <= value <= 1:
                raise ValueError(f"{keys}{name} is in [0, 1], not {value}")
        if not 0 < self.prior < 1:
            raise ValueError(f"{keys}PRIOR is between 0 and 1, not {self.prior}")

    def target(self, quality: Tensor) -> Tensor:
        """Returns the target probability of matches with these IoUs, of the same shape."""
        return 1 - self.iou_target * (1 - quality)


class SoftmaxFocalClassification(SoftmaxClassification):
    """The softmax with soft targets: t on the class of a match and 1 - t on no-object.

    Each -t log p is weighted by abs(t - p)^gamma, so that the loss is zero where p equals t.
    Scores, matching and normalizer are the softmax's; ``alpha`` and ``prior`` are not used.
    """

    reads_quality = True

    def __init__(self, *, settings: FocalSettings, no_object_weight: float = 0.1) -> None:
        """Takes settings, and the weight of queries without a box."""
        super().__init__(no_object_weight=no_object_weight)
        self.settings = settings

    def loss(self, logits: Tensor, wanted: Tensor, quality: Tensor) -> Tensor:
        """See ``ClassificationLoss.loss``."""
        matched = wanted < logits.shape[-1] - 1
        target = self.settings.target(quality).where(matched, torch.ones_like(quality))
        log_p = logits.log_softmax(dim=-1)
        of_wanted = log_p.gather(-1, wanted[..., None])[..., 0]
        # Without a match, the second term has target 0 and is 0.
        costs = self._cost(target, of_wanted) + self._cost(1 - target, log_p[..., -1])
        return costs * (matched + self.no_object_weight * ~matched)

    def _cost(self, target: Tensor, log_p: Tensor) -> Tensor:
        return -_distance(target, log_p.exp(), self.settings.gamma) * target * log_p


class FocalClassification(ClassificationLoss):
    """A sigmoid for each class; the last of the K + 1 logits is not used.

    The loss of a class is its binary cross-entropy with the target t, weighted by
    abs(t - p)^gamma and by alpha for the wanted class, 1 - alpha for others. With
    ``iou_target`` 0 this is RetinaNet's focal loss, with 1 the quality focal loss.
    """

    same_scores = ("focal", "varifocal")

    def __init__(self, *, settings: FocalSettings) -> None:
        """Takes the settings of targets and weights."""
        self.settings = settings
        self.initial_bias = -math.log((1 - settings.prior) / settings.prior)

    def loss(self, logits: Tensor, wanted: Tensor, quality: Tensor) -> Tensor:
        """See ``ClassificationLoss.loss``."""
        logits = logits[..., :-1]
        is_wanted = wanted[..., None] == torch.arange(logits.shape[-1], device=logits.device)
        target = self.settings.target(quality)[..., None] * is_wanted
        entropy = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
        return (self._weight(logits.sigmoid(), target, is_wanted) * entropy).sum(dim=-1)

    def normalizer(self, matched: int, unmatched: int) -> float:
        """See ``ClassificationLoss.normalizer``: the matches."""
        return float(matched)

    def scores(self, logits: Tensor) -> Tensor:
        """See ``ClassificationLoss.scores``."""
        return logits[..., :-1].sigmoid()

    def matching_cost(self, logits: Tensor, labels: Tensor) -> Tensor:
        """See ``ClassificationLoss.matching_cost``: the focal loss if wanted minus if not."""
        logits = logits.gather(-1, labels)
        p, gamma, alpha = logits.sigmoid(), self.settings.gamma, self.settings.alpha
        wanted = -alpha * (1 - p).pow(gamma) * F.logsigmoid(logits)
        unwanted = -(1 - alpha) * p.pow(gamma) * F.logsigmoid(-logits)
        return wanted - unwanted

    def _weight(self, p: Tensor, target: Tensor, is_wanted: Tensor) -> Tensor:
        alpha = self.settings.alpha
        balance = alpha * is_wanted + (1 - alpha) * ~is_wanted
        return balance * _distance(target, p, self.settings.gamma)


class VarifocalClassification(FocalClassification):
    """As ``FocalClassification``, but the weight of the wanted class is its target.

    The others have the weight (1 - alpha) p^gamma.
    """

    def _weight(self, p: Tensor, target: Tensor, is_wanted: Tensor) -> Tensor:
        settings = self.settings
        return target.where(is_wanted, (1 - settings.alpha) * p.pow(settings.gamma))


def build_classification(
    name: str, *, no_object_weight: float, settings: FocalSettings
) -> ClassificationLoss:
    """Returns the loss that ``MODEL.MF_DETR.CLASSIFICATION`` names.

    Raises:
        ValueError: another name.
    """
    losses: dict[str, ClassificationLoss] = {
        "softmax": SoftmaxClassification(no_object_weight=no_object_weight),
        "softmax_focal": SoftmaxFocalClassification(
            settings=settings, no_object_weight=no_object_weight
        ),
        "focal": FocalClassification(settings=settings),
        "varifocal": VarifocalClassification(settings=settings),
    }
    if name not in losses:
        raise ValueError(f"MODEL.MF_DETR.CLASSIFICATION is one of {[*losses]}, not '{name}'")
    return losses[name]


def _distance(target: Tensor, p: Tensor, gamma: float) -> Tensor:
    """The distance between prediction and target, to a power."""
    return (target - p).abs().pow(gamma)
