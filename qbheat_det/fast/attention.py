# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Attention in other forms: for training in bfloat16 on CPUs, and for files in 8-bit integers."""

import torch
from torch import Tensor
from torch.nn import functional as F

from qbheat_det.layers import DotProductAttention, MapAttention

from .form import FastForm

_MAX_WEIGHTS = 1 << 20  # of an image; more attention weights would not fit into the CPU's cache


class ProductAttention(FastForm, DotProductAttention):
    """``DotProductAttention`` by two matrix products, in bfloat16.

    On CPUs, the backward pass of PyTorch's kernel in bfloat16 takes up to ten times as long.
    """

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
        weights = F.dropout(_attention_weights(query, key.transpose(2, 3), masked), dropout)
        return (weights @ value).transpose(1, 2).flatten(2)


class QuantizableMapAttention(FastForm, MapAttention):
    """``MapAttention`` for INT8 files. Convolutions, which are quantized, project keys and values.

    Does not apply dropout.
    """

    def forward(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
    ) -> Tensor:
        """See ``MapAttention.forward``."""
        assert self.in_proj_weight is not None, "keys and values are as wide as the queries"
        query_weight, key_weight, value_weight = self.in_proj_weight.chunk(3)
        query_bias, _, value_bias = self.in_proj_bias.chunk(3)
        queries = self.split_heads(F.linear(query, query_weight, query_bias))
        # Softmax is invariant to the bias of keys. The bias of values is added to the result.
        keys = self._convolve(key, key_weight)
        values = self._convolve(value, value_weight)
        masked = None if key_padding_mask is None else key_padding_mask[:, None, None]
        attended = _attention_weights(queries, keys, masked) @ values.transpose(2, 3)
        return self.out_proj(attended.transpose(1, 2).flatten(2) + value_bias)

    def _convolve(self, x: Tensor, weight: Tensor) -> Tensor:
        """Projects features (N, L, C) by a 1x1 convolution. Returns (N, heads, C / heads, L)."""
        image = x.transpose(1, 2)[..., None]  # (N, C, L, 1)
        y = F.conv2d(image, weight[:, :, None, None]).squeeze(3)
        return y.unflatten(1, (self.num_heads, -1))


def _attention_weights(query: Tensor, key: Tensor, masked: Tensor | None) -> Tensor:
    """Takes queries (N, heads, Q, d) and keys (N, heads, d, L). Returns (N, heads, Q, L)."""
    logits = (query * query.shape[-1] ** -0.5) @ key
    if masked is not None:
        logits = logits.masked_fill(masked, float("-inf"))
    return logits.softmax(dim=-1)
