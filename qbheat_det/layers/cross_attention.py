# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The two bridges between a map and a few tokens: attention without projections on the map.

Paper: "Mobile-Former: Bridging MobileNet and Transformer", Chen et al., arXiv:2108.05895, Sec. 3.1.
The widths and the gate on Mobile->Former follow the authors' public ImageNet code; they are what
reproduces the parameter counts that the QB-Heat paper prints (Tables 1 and 5).

Where ``read_attention`` has put ``watchers``, both tell them their weights.

A batch of maps in channels-last order cannot be cut into heads without a copy. There, the tokens
are cut: each head's row is zero in the channels of the others, which makes the same sums.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .recording import is_recorded

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
        query = self.query(tokens).unflatten(2, (self.num_heads, -1)).transpose(1, 2)
        query = query * query.shape[-1] ** -0.5
        rows = has_rows(x)
        if rows:
            pixels = x.flatten(2)  # (N, C, HW)
            logits = (_spread(query) @ pixels).unflatten(1, (self.num_heads, -1))
        else:
            pixels = x.flatten(2).unflatten(1, (self.num_heads, -1))  # (N, heads, C / heads, HW)
            logits = query @ pixels  # (N, heads, M, HW)
        if padding is not None:
            logits = logits.masked_fill(padding.flatten(2)[:, :, None], float("-inf"))
        attention = logits.softmax(dim=-1)
        for watch in self.watchers:
            watch(attention, (x.shape[-2], x.shape[-1]))
        if rows:
            gathered = _collect(attention.flatten(1, 2) @ pixels.transpose(1, 2), self.num_heads)
        else:
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
        key = self.key(tokens).unflatten(2, (self.num_heads, -1)).transpose(1, 2)
        key = key * key.shape[-1] ** -0.5
        value = self.value(tokens).unflatten(2, (self.num_heads, -1)).transpose(1, 2)
        # Tokens on the rows: the map is read in its own layout and never transposed.
        rows = has_rows(x)
        if rows:
            logits = (_spread(key) @ x.flatten(2)).unflatten(1, (self.num_heads, -1))
        else:
            logits = key @ x.flatten(2).unflatten(1, (self.num_heads, -1))  # (N, heads, M, HW)
        attention = logits.softmax(dim=-2)
        for watch in self.watchers:
            watch(attention, (x.shape[-2], x.shape[-1]))
        if rows:
            pixels = x.flatten(2).transpose(1, 2)  # (N, HW, C)
            weights = attention.flatten(1, 2).transpose(1, 2)  # (N, HW, heads * M)
            spread = _spread(value)
            if x.dtype == weights.dtype == spread.dtype:  # added within the product
                found = torch.baddbmm(pixels, weights, spread)
            else:  # autocast would round the map
                found = pixels + weights @ spread
            return found.transpose(1, 2).unflatten(2, x.shape[-2:])
        return x + (value.transpose(-2, -1) @ attention).view_as(x)


def has_rows(x: Tensor) -> bool:
    """Whether maps lie as several images in channels-last order, and nobody records the graph."""
    if is_recorded() or len(x) == 1:
        return False
    return x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()


def _spread(heads: Tensor) -> Tensor:
    """(N, heads, M, C / heads) to (N, heads * M, C), zero in the channels of other heads."""
    num_heads = heads.shape[1]
    own = torch.eye(num_heads, dtype=heads.dtype, device=heads.device)
    return (heads[:, :, :, None] * own[:, None, :, None]).flatten(3).flatten(1, 2)


def _collect(spread: Tensor, num_heads: int) -> Tensor:
    """(N, heads * M, C) to (N, heads, M, C / heads), each head's own channels."""
    by_head = spread.unflatten(2, (num_heads, -1)).unflatten(1, (num_heads, -1))
    return by_head.diagonal(dim1=1, dim2=3).movedim(-1, 1)
