# Copyright (c) qbheat_det contributors. Apache-2.0.
"""A transformer block that can end at some of the positions that it reads.

Behind the last block of a decoder whose loss looks at masked patches alone, three quarters of the
positions count. What the others would be asked and told costs as much, and changes nothing.
"""

from typing import Any

from timm.models.vision_transformer import Block
from torch import Tensor
from torch.nn import functional as F

from qbheat_det.layers import linear, replace_linear_layers


class DecoderBlock(Block):
    """timm's pre-norm block, with the names of its parameters; without dropout and layer scale."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        replace_linear_layers(self)

    def forward(self, x: Tensor, positions: Tensor | None = None, **kwargs: Any) -> Tensor:
        """
        Args:
            x: (N, L, D).
            positions: (N, K), indices of those whose results are wanted; None for all, in order.
            kwargs: of timm's block, where ``positions`` is None.

        Returns:
            (N, L, D) or (N, K, D), for which each position has attended to all L.
        """
        if positions is None:
            whole: Tensor = super().forward(x, **kwargs)
            return whole
        known = self.norm1(x)
        x = take(x, positions) + self._attend(take(known, positions), known)
        return x + self.mlp(self.norm2(x))

    def _attend(self, asking: Tensor, known: Tensor) -> Tensor:
        """From (N, K, D) that ask and (N, L, D) that answer to (N, K, D), as timm's attention."""
        attention = self.attn
        widths = [asking.shape[-1], 2 * asking.shape[-1]]
        weight_q, weight_kv = attention.qkv.weight.split(widths)
        bias_q, bias_kv = attention.qkv.bias.split(widths)
        heads = (attention.num_heads, -1)
        query = linear(asking, weight_q, bias_q).unflatten(2, heads).transpose(1, 2)
        pairs = linear(known, weight_kv, bias_kv).unflatten(2, (2, *heads))
        key, value = pairs.permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(query, key, value)
        projected: Tensor = attention.proj(attended.transpose(1, 2).flatten(2))
        return projected


def take(x: Tensor, positions: Tensor) -> Tensor:
    """From (N, L, D) and indices (N, K) to (N, K, D)."""
    return x.gather(1, positions.unsqueeze(-1).expand(-1, -1, x.shape[-1]))


def hidden_positions(visible: Tensor, count: int) -> Tensor:
    """Returns indices of what is not visible, in order.

    Args:
        visible: (N, L), with ``count`` positions of each image that are False.
        count: K, known to the host, so that nothing waits for the device.

    Returns:
        (N, K).
    """
    return visible.byte().argsort(dim=1, stable=True)[:, :count]
