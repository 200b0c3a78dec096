# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Former: the transformer layer on the global tokens.

Paper: "Mobile-Former", arXiv:2108.05895, Sec. 3.1. As in the authors' public code, keys and values
are the tokens themselves (no projections), the norms come after the additions and the hidden layer
is twice as wide as the tokens.
"""

from timm.layers import DropPath
from torch import Tensor, nn
from torch.nn import functional as F


class Former(nn.Module):
    """Self-attention among the tokens with a query projection only, then a two-layer MLP."""

    def __init__(self, *, token_dim: int, num_heads: int = 4, drop_path: float = 0.0) -> None:
        """
        Args:
            token_dim: width D of the tokens, divisible by ``num_heads``.
            num_heads: number of heads.
            drop_path: probability to drop a residual branch for an image while training.
        """
        super().__init__()
        self.num_heads = num_heads
        self.query = nn.Linear(token_dim, token_dim)
        self.project = nn.Linear(token_dim, token_dim)
        self.attention_norm = nn.LayerNorm(token_dim)
        self.mlp = nn.Sequential(
            nn.Linear(token_dim, 2 * token_dim), nn.GELU(), nn.Linear(2 * token_dim, token_dim)
        )
        self.mlp_norm = nn.LayerNorm(token_dim)
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(self, tokens: Tensor) -> Tensor:
        """
        Args:
            tokens: (N, M, D).

        Returns:
            (N, M, D).
        """
        query, memory = (
            t.unflatten(2, (self.num_heads, -1)).transpose(1, 2)
            for t in (self.query(tokens), tokens)
        )
        attended = F.scaled_dot_product_attention(query, memory, memory)
        attended = self.project(attended.transpose(1, 2).flatten(2))
        tokens = self.attention_norm(tokens + self.drop_path(attended))
        return self.mlp_norm(tokens + self.drop_path(self.mlp(tokens)))
