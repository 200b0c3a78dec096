# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Losses that several detectors use."""

from torch import Tensor
from torch.nn import functional as F


def quality_focal_loss(logits: Tensor, targets: Tensor, gamma: float) -> Tensor:
    """Returns the quality focal loss (arXiv:2006.04388) of each logit.

    ``targets`` in [0, 1] have the shape of ``logits``. ``gamma`` is the exponent of the distance
    between target and prediction.
    """
    bce = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    return (targets - logits.sigmoid()).abs() ** gamma * bce
