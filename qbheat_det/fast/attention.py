# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Attention by matrix products, for training in bfloat16 on CPUs.

There, PyTorch's kernel has a slow backward pass: for 16 images of QB-Heat at 128 pixels, a layer
takes 97 ms of CPU time, and by matrix products 26 ms (Xeon, one thread).
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from qbheat_det.layers import DotProductAttention

from .form import FastForm

_MAX_WEIGHTS = 1 << 20  # of an image; more attention weights would not fit into the CPU's cache


class ProductAttention(FastForm, DotProductAttention):
    """``DotProductAttention`` by two matrix products if the inputs are in bfloat16."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        masked: Tensor | None = None,
        dropout: float = 0.0,
    ) -> Tensor:
        """See ``DotProductAttention.forward``."""
        num_weights = query.shape[1] * query.shape[2] * key.shape[2]
        if query.dtype != torch.bfloat16 or num_weights > _MAX_WEIGHTS:
            return super().forward(query, key, value, masked=masked, dropout=dropout)
        logits = (query * query.shape[-1] ** -0.5) @ key.transpose(2, 3)
        if masked is not None:
            logits = logits.masked_fill(masked, float("-inf"))
        weights = F.dropout(logits.softmax(dim=-1), dropout)
        return (weights @ value).transpose(1, 2).flatten(2)
