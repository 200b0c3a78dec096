# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Losses that several detectors use."""

from torch import Tensor
from torch.nn import functional as F


def quality_focal_loss(logits: Tensor, targets: Tensor, gamma: float) -> Tensor:
    """Returns the quality focal loss (arXiv:2006.04388) of each logit.

    It is the binary cross-entropy, times the distance between target and prediction to the power of
    ``gamma``. ``targets`` in [0, 1] have the shape of ``logits``.
    """
    cross_entropy = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    distance = (targets - logits.sigmoid()).abs()
    return distance**gamma * cross_entropy
