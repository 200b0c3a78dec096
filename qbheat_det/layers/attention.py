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
        is_read = None if masked is None else ~masked
        attended = F.scaled_dot_product_attention(query, key, value, is_read, dropout)
        return attended.transpose(1, 2).flatten(2)


class MapAttention(nn.MultiheadAttention):
    """``torch.nn.MultiheadAttention`` for inputs (N, length, C), which calls its ``attend``."""

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
        """Takes queries (N, Q, C), keys and values (N, L, C). Returns (N, Q, C).

        ``key_padding_mask`` (N, L) is True at keys that all queries ignore.
        """
        if self.watchers:
            output, weights = super().forward(
                query, key, value, key_padding_mask, average_attn_weights=False
            )
            for watch in self.watchers:
                watch(cast(Tensor, weights))
            return output
        masked = None if key_padding_mask is None else key_padding_mask[:, None, None]
        dropout = self.dropout if self.training else 0.0
        attended = self.attend(*self.project(query, key, value), masked=masked, dropout=dropout)
        return self.out_proj(attended)

    def project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Projects queries (N, Q, C), keys and values (N, L, C), and splits them into heads.

        Returns queries (N, heads, Q, C / heads), keys and values (N, heads, L, C / heads).
        """
        assert self.in_proj_weight is not None, "keys and values are as wide as the queries"
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
"""Detached attention weights by layer name, one tensor per call of the layer.

``MobileToFormer``: (N, heads, M, H, W), which sum to 1 over pixels. ``FormerToMobile``: (N, heads,
M, H, W), which sum to 1 over tokens. ``MapAttention``: (N, heads, queries, keys), which sum to 1
over keys. The weights of masked keys are 0.
"""


@contextmanager
def read_attention(
    model: nn.Module, names: Collection[str] | None = None
) -> Iterator[AttentionRecord]:
    """Records the attention weights of all layers of ``model``, or of the layers in ``names``.

    While recording, outputs of ``MapAttention`` change by rounding errors. Outputs of all other
    layers do not change. Contexts may be nested. In training, the weights of ``MapAttention`` are
    recorded after dropout.
    """
    record: AttentionRecord = {}
    with ExitStack() as undo:
        for name, module in model.named_modules():
            watched = isinstance(module, MobileToFormer | FormerToMobile | MapAttention)
            if watched and (names is None or name in names):

                def watch(weights: Tensor, name: str = name) -> None:
                    record.setdefault(name, []).append(weights.detach())

                module.watchers.append(watch)
                undo.callback(module.watchers.remove, watch)
        yield record
