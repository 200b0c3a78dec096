# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The contrastive loss of MoCo: which of K + 1 keys belongs to the query.

"Momentum Contrast for Unsupervised Visual Representation Learning", arXiv:1911.05722, Eq. 1.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def similarity_logits(
    queries: Tensor, keys: Tensor, others: Tensor, *, temperature: float
) -> Tensor:
    """Returns logits (N, 1 + K): the similarity to the own key first, then to the others.

    Args:
        queries: (N, D), of length 1.
        keys: (N, D), of length 1, each of the same image as its query.
        others: (K, D), of length 1, taken for those of other images.
        temperature: what similarities are divided by.
    """
    with torch.autocast(queries.device.type, enabled=False):
        own = (queries * keys).sum(dim=1, keepdim=True)
        return torch.cat([own, queries @ others.T], dim=1) / temperature


def info_nce(logits: Tensor) -> Tensor:
    """Returns the loss (N,) of logits from ``similarity_logits``."""
    targets = torch.zeros(len(logits), dtype=torch.long, device=logits.device)
    return F.cross_entropy(logits, targets, reduction="none")
