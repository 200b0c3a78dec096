# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The decoder of reconstruction: a small transformer from features to pixels.

Papers: QB-Heat, arXiv:2211.13228, Sec. 4.2; heads, MLP, positions and initialisation are those of
"Masked Autoencoders Are Scalable Vision Learners" (MAE), arXiv:2111.06377. Where only masked
patches count, the last block computes nothing for the others, three in four of its queries.
"""

from functools import partial
from math import isqrt
from typing import Any

import torch
from timm.layers import build_sincos2d_pos_embed
from timm.models.vision_transformer import Block
from torch import Tensor, nn
from torch.nn import functional as F

from qbheat_det.layers import Linear, linear, replace_linear_layers


class DecoderBlock(Block):
    """timm's pre-norm block, with the names of its parameters; without dropout and layer scale."""

    def forward(self, x: Tensor, positions: Tensor | None = None, **kwargs: Any) -> Tensor:
        """From (N, L, D) to the same, or to (N, K, D) for the indices (N, K) of ``positions``."""
        if positions is None:
            return super().forward(x, **kwargs)
        memory = self.norm1(x)
        x = take(x, positions) + self._attend(take(memory, positions), memory)
        return x + self.mlp(self.norm2(x))

    def _attend(self, queries: Tensor, memory: Tensor) -> Tensor:
        """Attends from (N, K, D) to (N, L, D) with timm's weights; returns (N, K, D)."""
        attention = self.attn
        dim = queries.shape[-1]
        weight_q, weight_kv = attention.qkv.weight.split([dim, 2 * dim])
        bias_q, bias_kv = attention.qkv.bias.split([dim, 2 * dim])
        heads = (attention.num_heads, -1)
        query = linear(queries, weight_q, bias_q).unflatten(2, heads).transpose(1, 2)
        pairs = linear(memory, weight_kv, bias_kv).unflatten(2, (2, *heads))
        key, value = pairs.permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(query, key, value)
        return attention.proj(attended.transpose(1, 2).flatten(2))


class ReconstructionDecoder(nn.Module):
    """Pre-norm transformer blocks over all positions, visible and predicted, and a linear head."""

    def __init__(
        self,
        *,
        in_channels: int,
        grid_size: int,
        patch_size: int,
        dim: int = 512,
        depth: int = 6,
        num_heads: int = 16,
        mlp_ratio: float = 4.0,
    ) -> None:
        """
        Args:
            in_channels: C of the features; a linear layer brings them to ``dim`` if it differs.
            grid_size: G, rows and columns of the features.
            patch_size: rows and columns of pixels that a position reconstructs.
            dim: width of the blocks.
            depth: number of blocks.
            num_heads: of the attention.
            mlp_ratio: hidden width of the feed-forward networks, in widths.

        Raises:
            ValueError: ``dim`` is not divisible by the number of heads and by 4, or a number is not
                positive.
        """
        super().__init__()
        if min(dim, num_heads) < 1 or dim % num_heads or dim % 4:
            raise ValueError(
                f"DECODER_DIM {dim} must be positive and divisible by 4 and by DECODER_HEADS "
                f"{num_heads}"
            )
        if depth < 1 or not mlp_ratio > 0:
            raise ValueError(
                f"DECODER_DEPTH is at least 1, not {depth}, and DECODER_MLP_RATIO above 0, not "
                f"{mlp_ratio}"
            )
        self.grid_size = grid_size
        self.patch_size = patch_size
        self.embed = nn.Identity() if in_channels == dim else Linear(in_channels, dim)
        position = build_sincos2d_pos_embed([grid_size, grid_size], dim)
        self.register_buffer("position", position, persistent=False)
        self.position: Tensor  # (G * G, dim)
        norm = partial(nn.LayerNorm, eps=1e-6)
        self.blocks = nn.Sequential(
            *(
                DecoderBlock(dim, num_heads, mlp_ratio=mlp_ratio, qkv_bias=True, norm_layer=norm)
                for _ in range(depth)
            )
        )
        replace_linear_layers(self.blocks)
        self.norm = norm(dim)
        self.head = Linear(dim, 3 * patch_size**2)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)

    @property
    def image_size(self) -> int:
        """Side of the image in pixels."""
        return self.grid_size * self.patch_size

    def forward(self, z: Tensor, positions: Tensor | None = None) -> Tensor:
        """From (N, G, G, C) to pixels as of ``patchify``, (N, G * G, 3 * patch_size ** 2).

        With indices (N, K) of ``positions`` only these are reconstructed, (N, K, …).
        """
        x = self.embed(z.flatten(1, 2)) + self.position
        *blocks, last = self.blocks
        for block in blocks:
            x = block(x)
        x = last(x) if positions is None else last(x, positions)
        return self.head(self.norm(x))


def patchify(images: Tensor, patch_size: int, positions: Tensor | None = None) -> Tensor:
    """Cuts (N, 3, S, S) into patches in row order, (N, G * G, 3 * patch_size ** 2), or some."""
    squares = images.unflatten(3, (-1, patch_size)).unflatten(2, (-1, patch_size))
    # One copy, after which the values of a patch are contiguous.
    patches = squares.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
    return patches if positions is None else take(patches, positions)


def unpatchify(patches: Tensor, patch_size: int) -> Tensor:
    """Undoes ``patchify``."""
    grid_size = isqrt(patches.shape[1])
    maps = patches.transpose(1, 2).unflatten(2, (grid_size, grid_size))
    return F.pixel_shuffle(maps, patch_size)


def take(x: Tensor, positions: Tensor) -> Tensor:
    """From (N, L, D) and indices (N, K) to (N, K, D)."""
    first = torch.arange(0, x.shape[0] * x.shape[1], x.shape[1], device=x.device)
    rows = (positions + first[:, None]).flatten()  # whole rows: gather takes numbers one by one
    return x.flatten(0, 1).index_select(0, rows).unflatten(0, positions.shape)


def masked_positions(visible: Tensor, count: int) -> Tensor:
    """From (N, L), False at ``count`` positions each, to the indices (N, K) of these, in order.

    The count is known on the host, so that nothing waits for the device.
    """
    return visible.byte().argsort(dim=1, stable=True)[:, :count]
