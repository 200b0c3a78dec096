# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Attention by matrix products, for training in bfloat16 on CPUs.

There, PyTorch's attention kernel has a slow backward pass. For 16 images of QB-Heat at 128 pixels,
an attention layer takes 97 ms of CPU time with this kernel, and 26 ms with matrix products (Xeon,
one thread).
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from qbheat_det.layers import DotProductAttention

from .form import FastForm

_MAX_WEIGHTS = 1 << 20  # attention weights of an image; more do not fit into the CPU's cache


class ProductAttention(FastForm, DotProductAttention):
    """``DotProductAttention`` by two matrix products, if the inputs are small and in bfloat16."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        masked: Tensor | None = None,
        dropout: float = 0.0,
    ) -> Tensor:
        """Attends from queries (N, heads, Q, d) to keys and values (N, heads, L, d).

        Returns (N, Q, heads * d). ``masked`` and ``dropout`` are those of ``DotProductAttention``.
        """
        num_heads = query.shape[1]
        num_queries = query.shape[2]
        num_keys = key.shape[2]
        num_weights = num_heads * num_queries * num_keys
        if query.dtype != torch.bfloat16 or num_weights > _MAX_WEIGHTS:
            return super().forward(query, key, value, masked=masked, dropout=dropout)
        logits = (query * query.shape[-1] ** -0.5) @ key.transpose(2, 3)  # (N, heads, Q, L)
        if masked is not None:
            logits = logits.masked_fill(masked, float("-inf"))
        weights = F.dropout(logits.softmax(dim=-1), dropout)
        attended = weights @ value  # (N, heads, Q, d)
        return attended.transpose(1, 2).flatten(2)
