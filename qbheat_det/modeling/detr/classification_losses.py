# Copyright (c) qbheat_det contributors. Apache-2.0.
"""How MF-DETR's K + 1 logits are read: loss in training, cost in matching, scores in inference.

Paper: "End-to-End Object Detection with Transformers", arXiv:2005.12872, Sec. 3.1 and A.2.
"""

from abc import ABC, abstractmethod

from torch import Tensor
from torch.nn import functional as F


class ClassificationLoss(ABC):
    """One reading of logits (…, K + 1), of which the last is the no-object class.

    ``initial_bias`` is what the biases of the logits start at, and ``least_normalizer`` the least
    that a sum over an effective batch is divided by.
    """

    initial_bias: float = 0.0
    least_normalizer: float = 1.0

    @abstractmethod
    def loss(self, logits: Tensor, wanted: Tensor, quality: Tensor) -> Tensor:
        """
        Args:
            logits: (N, …, K + 1), float32.
            wanted: (N, …), classes in [0, K], where K is "no object".
            quality: (N, …), IoU in [0, 1] of a query's box with the one it is matched to; without
                meaning where K is wanted. No gradient goes through it.

        Returns:
            (N, …), what each query costs, before division by ``normalizer``.
        """

    @abstractmethod
    def normalizer(self, matched: int, unmatched: int) -> float:
        """Returns what a sum over so many queries is divided by, were they the whole batch."""

    @abstractmethod
    def scores(self, logits: Tensor) -> Tensor:
        """Returns (…, K), probabilities of the classes, without no-object, of (…, K + 1)."""

    def matching_cost(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Returns (…, T), what it would cost to want these classes, up to a constant.

        Args:
            logits: (…, K + 1), float32.
            labels: (…, T), classes in [0, K).
        """
        # -p stands for 1 - p.
        return -self.scores(logits).gather(-1, labels)


class SoftmaxClassification(ClassificationLoss):
    """DETR's: a softmax over K + 1 classes, in which no-object weighs less."""

    least_normalizer = 1e-6  # zero only where the sum is: no box, and no weight without

    def __init__(self, *, no_object_weight: float = 0.1) -> None:
        """
        Args:
            no_object_weight: weight of queries without a box.
        """
        self.no_object_weight = no_object_weight

    def loss(self, logits: Tensor, wanted: Tensor, quality: Tensor) -> Tensor:
        """See ``ClassificationLoss.loss``: weighted cross-entropy, whatever the quality."""
        weight = logits.new_ones(logits.shape[-1])
        weight[-1] = self.no_object_weight
        return F.cross_entropy(logits.movedim(-1, 1), wanted, weight, reduction="none")

    def normalizer(self, matched: int, unmatched: int) -> float:
        """See ``ClassificationLoss.normalizer``: the sum of all queries' weights."""
        return matched + self.no_object_weight * unmatched

    def scores(self, logits: Tensor) -> Tensor:
        """See ``ClassificationLoss.scores``; no-object takes part but is never an answer."""
        return logits.softmax(dim=-1)[..., :-1]
