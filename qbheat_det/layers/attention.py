# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Multi-head attention, and a context that records attention weights.

Paper: "Attention Is All You Need", Vaswani et al., arXiv:1706.03762, Sec. 3.2.
"""

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import cast

from torch import Tensor, nn
from torch.nn import functional as F

from .mobile_former_block import FormerToMobile, MobileToFormer, Watcher


class DotProductAttention(nn.Module):
    """Scaled dot-product attention with several heads. Has no parameters."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        masked: Tensor | None = None,
        dropout: float = 0.0,
    ) -> Tensor:
        """
        Args:
            query: (N, heads, Q, d).
            key: (N, heads, L, d).
            value: (N, heads, L, d).
            masked: broadcastable to (N, heads, Q, L), True if a query may not attend to a key. Each
                query must attend to at least one key.
            dropout: probability, in [0, 1), of dropping a weight.

        Returns:
            The weighted values (N, Q, heads * d).
        """
        may_attend = None if masked is None else ~masked
        attended = F.scaled_dot_product_attention(
            query, key, value, attn_mask=may_attend, dropout_p=dropout
        )  # (N, heads, Q, d)
        return attended.transpose(1, 2).flatten(2)


class MapAttention(nn.MultiheadAttention):
    """``torch.nn.MultiheadAttention`` for inputs (N, length, C).

    The child ``attend`` computes the attention between the projected queries, keys and values.
    """

    def __init__(self, *, dim: int, num_heads: int, dropout: float = 0.0) -> None:
        """Takes the width C, divisible by ``num_heads``, and the dropout rate of the weights."""
        super().__init__(dim, num_heads, dropout=dropout, batch_first=True)
        self.attend = DotProductAttention()
        self.watchers: list[Watcher] = []

    def forward(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
    ) -> Tensor:
        """Takes queries (N, Q, C), keys (N, L, C) and values (N, L, C). Returns (N, Q, C).

        ``key_padding_mask`` (N, L) is True at keys that all queries ignore.
        """
        if self.watchers:
            output, weights = super().forward(
                query, key, value, key_padding_mask, average_attn_weights=False
            )
            for watch in self.watchers:
                watch(cast(Tensor, weights))
            return output
        masked = None
        if key_padding_mask is not None:
            masked = key_padding_mask[:, None, None]  # (N, 1, 1, L)
        dropout = self.dropout if self.training else 0.0
        query, key, value = self.project(query, key, value)
        return self.out_proj(self.attend(query, key, value, masked=masked, dropout=dropout))

    def project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Projects queries (N, Q, C), keys (N, L, C) and values (N, L, C), and splits the heads.

        Returns queries (N, heads, Q, C / heads). Keys and values are (N, heads, L, C / heads).
        """
        # PyTorch sets it to None only if keys or values are not as wide as the queries.
        assert self.in_proj_weight is not None
        weights = self.in_proj_weight.chunk(3)
        biases = self.in_proj_bias.chunk(3)
        query = F.linear(query, weights[0], biases[0])
        key = F.linear(key, weights[1], biases[1])
        value = F.linear(value, weights[2], biases[2])
        return self.split_heads(query), self.split_heads(key), self.split_heads(value)

    def split_heads(self, x: Tensor) -> Tensor:
        """Splits features (N, length, C) into heads (N, heads, length, C / heads)."""
        return x.unflatten(2, (self.num_heads, -1)).transpose(1, 2)


AttentionRecord = dict[str, list[Tensor]]
"""Attention weights by layer name, without gradients: one tensor for each call of the layer.

The shape depends on the type of the layer:

* ``MobileToFormer``: (N, heads, M, H, W). The weights of a token sum to 1 over pixels.
* ``FormerToMobile``: (N, heads, M, H, W). The weights of a pixel sum to 1 over tokens.
* ``MapAttention``: (N, heads, Q, L). The weights of a query sum to 1 over keys.

The weights of masked keys are 0.
"""


@contextmanager
def read_attention(
    model: nn.Module, names: Collection[str] | None = None
) -> Iterator[AttentionRecord]:
    """Records the attention weights of all layers of ``model``, or of the layers in ``names``.

    The record is filled when the model runs inside the ``with`` block. Such blocks may be nested.
    While recording, outputs of ``MapAttention`` change by rounding errors, and outputs of all other
    layers do not change. In training, the weights of ``MapAttention`` are recorded after dropout.
    """
    record: AttentionRecord = {}
    with ExitStack() as stack:
        for name, module in model.named_modules():
            has_attention = isinstance(module, MobileToFormer | FormerToMobile | MapAttention)
            if not has_attention or (names is not None and name not in names):
                continue

            # The default value keeps the name of this iteration.
            def watch(weights: Tensor, name: str = name) -> None:
                record.setdefault(name, []).append(weights.detach())

            module.watchers.append(watch)
            stack.callback(module.watchers.remove, watch)
        yield record
