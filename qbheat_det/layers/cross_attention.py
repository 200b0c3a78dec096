# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The two bridges between a map and a few tokens: attention without projections on the map.

Paper: "Mobile-Former: Bridging MobileNet and Transformer", Chen et al., arXiv:2108.05895, Sec. 3.1.
The widths and the gate on Mobile->Former follow the authors' public ImageNet code; they are what
reproduces the parameter counts that the QB-Heat paper prints (Tables 1 and 5).

Where ``read_attention`` has put ``watchers``, both tell them their weights.
"""

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

Watcher = Callable[[Tensor, tuple[int, int]], None]
"""Takes the weights of one call, (N, heads, M, HW), and the size (H, W) of its map."""


class MobileToFormer(nn.Module):
    """Tokens gather from the map: attention over pixels, whose keys and values are the pixels."""

    def __init__(self, *, token_dim: int, channels: int, num_heads: int = 2) -> None:
        """
        Args:
            token_dim: width D of the tokens.
            channels: C of the map, divisible by ``num_heads``.
            num_heads: number of heads.
        """
        super().__init__()
        self.num_heads = num_heads
        self.watchers: list[Watcher] = []
        self.query = nn.Linear(token_dim, channels)
        self.gate = nn.Linear(token_dim, channels)
        self.project = nn.Linear(channels, token_dim)
        self.norm = nn.LayerNorm(token_dim)

    def forward(self, tokens: Tensor, x: Tensor, padding: Tensor | None = None) -> Tensor:
        """
        Args:
            tokens: (N, M, D).
            x: (N, C, H, W).
            padding: (N, 1, H, W), True where the map holds no image; those pixels get no weight.

        Returns:
            (N, M, D), normalised.
        """
        pixels = x.flatten(2).unflatten(1, (self.num_heads, -1))  # (N, heads, C / heads, HW)
        query = self.query(tokens).unflatten(2, (self.num_heads, -1)).transpose(1, 2)
        logits = (query * query.shape[-1] ** -0.5) @ pixels  # (N, heads, M, HW)
        if padding is not None:
            logits = logits.masked_fill(padding.flatten(2)[:, :, None], float("-inf"))
        attention = logits.softmax(dim=-1)
        for watch in self.watchers:
            watch(attention, (x.shape[-2], x.shape[-1]))
        gathered = attention @ pixels.transpose(-2, -1)
        gathered = gathered.transpose(1, 2).flatten(2)  # (N, M, C)
        gate = 2 * F.hardsigmoid(self.gate(tokens))
        return self.norm(tokens + self.project(gate * gathered))


class FormerToMobile(nn.Module):
    """The map gathers from the tokens: attention over tokens, whose queries are the pixels."""

    def __init__(self, *, token_dim: int, channels: int, num_heads: int = 2) -> None:
        """
        Args:
            token_dim: width D of the tokens.
            channels: C of the map, divisible by ``num_heads``.
            num_heads: number of heads.
        """
        super().__init__()
        self.num_heads = num_heads
        self.watchers: list[Watcher] = []
        self.key = nn.Linear(token_dim, channels)
        self.value = nn.Linear(token_dim, channels)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        """
        Args:
            x: (N, C, H, W).
            tokens: (N, M, D).

        Returns:
            (N, C, H, W): the map plus what each pixel gathered.
        """
        pixels = x.flatten(2).unflatten(1, (self.num_heads, -1))  # (N, heads, C / heads, HW)
        key = self.key(tokens).unflatten(2, (self.num_heads, -1)).transpose(1, 2)
        value = self.value(tokens).unflatten(2, (self.num_heads, -1)).permute(0, 2, 3, 1)
        # Tokens on the rows: the map is read in its own layout and never transposed.
        attention = ((key * key.shape[-1] ** -0.5) @ pixels).softmax(dim=-2)  # (N, heads, M, HW)
        for watch in self.watchers:
            watch(attention, (x.shape[-2], x.shape[-1]))
        return x + (value @ attention).view_as(x)
