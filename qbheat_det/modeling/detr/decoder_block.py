# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The blocks of MF-DETR's decoder: object queries and a feature map that update each other.

Paper: QB-Heat, arXiv:2211.13228, Sec. B.2 and Table 13. Query layers follow DETR, arXiv:2005.12872
(post-norm), and all other layers follow Mobile-Former, arXiv:2108.05895. Blocks M-F+ (stride 32)
update the feature map by self-attention, and M-F- (strides 16, 8) by a lite bottleneck.

The paper's parameter counts imply four attention projections in query layers (query, key, value,
output), 1024 hidden units in feed-forward networks, and a bottleneck that expands the width by 6.
The paper does not state three choices: attention has 8 heads, the first query controls the dynamic
ReLU of M-F-, and each block first adds an MLP of the queries to their position encodings.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn
from torch.nn import functional as F

from qbheat_det.layers import (
    DotProductAttention,
    DynamicReLU,
    MapAttention,
    depthwise,
    pointwise,
    zero_padding,
)
from qbheat_det.modeling.checks import check_value


@dataclass(frozen=True)
class DecoderWidths:
    """Sizes that all blocks of a decoder share."""

    dim: int = 256  # C, the width of queries and feature maps
    num_heads: int = 8
    hidden: int = 1024  # hidden width of the feed-forward networks
    expansion: int = 6  # expansion of the lite bottleneck in M-F-
    dropout: float = 0.1

    def __post_init__(self) -> None:
        fits = self.dim % self.num_heads == 0 and self.dim % 4 == 0
        allowed = f"divisible by 4 and NHEADS ({self.num_heads})"
        check_value(fits, "MF_DETR.HIDDEN_DIM", self.dim, allowed)


@dataclass(frozen=True)
class LevelMap:
    """The flattened feature map of one level, with its position encoding, size and padding."""

    x: Tensor  # (N, HW, C)
    position: Tensor  # (N or 1, HW, C)
    size: Sequence[int]  # (H, W)
    padding: Tensor | None  # (N, 1, H, W), True where there is no image

    @property
    def ignored(self) -> Tensor | None:
        """A mask (N, HW), True at positions that attention ignores."""
        if self.padding is None:
            return None
        return self.padding.flatten(1)

    def as_image(self, x: Tensor) -> Tensor:
        """Views (N, HW, C) as (N, C, H, W) in channels-last format, without a copy."""
        # unflatten comes before permute, so that strides are channels-last even for N = 1.
        return x.unflatten(1, tuple(self.size)).permute(0, 3, 1, 2)


def feed_forward(widths: DecoderWidths) -> nn.Sequential:
    """Builds a feed-forward network: linear layer, ReLU, dropout, linear layer."""
    return nn.Sequential(
        nn.Linear(widths.dim, widths.hidden),
        nn.ReLU(),
        nn.Dropout(widths.dropout),
        nn.Linear(widths.hidden, widths.dim),
    )


def attention(widths: DecoderWidths) -> MapAttention:
    """Builds multi-head attention on (N, length, C)."""
    return MapAttention(dim=widths.dim, num_heads=widths.num_heads, dropout=widths.dropout)


class SeparableConv(nn.Module):
    """A depthwise 3x3 convolution, norm, ReLU6, a pointwise convolution and norm."""

    def __init__(self, in_channels: int, out_channels: int, norm: str, stride: int = 1) -> None:
        super().__init__()
        self.depthwise = depthwise(in_channels, in_channels, norm, stride=stride)
        self.pointwise = pointwise(in_channels, out_channels, norm)

    def forward(self, x: Tensor, padding: Tensor | None) -> Tensor:
        """Takes a map (N, C, H, W). Returns (N, C', ceil(H / stride), ceil(W / stride))."""
        return self.pointwise(F.relu6(self.depthwise(zero_padding(x, padding))))


class MaskedGroupNorm(nn.GroupNorm):
    """GroupNorm whose statistics exclude the padding of a batch."""

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        """Normalizes a map (N, C, H, W). ``padding`` (N, 1, H, W) is True outside the images."""
        if padding is None:
            return super().forward(x)
        valid = (~padding).to(x.dtype)[:, :, None]  # (N, 1, 1, H, W)
        # (N, groups, C / groups, H, W), with zeros in the padding
        groups = zero_padding(x, padding).unflatten(1, (self.num_groups, -1))
        num_positions = valid.sum(dim=(2, 3, 4), keepdim=True)
        count = num_positions * groups.shape[2]  # values of a group
        mean = groups.sum(dim=(2, 3, 4), keepdim=True) / count
        centred = (groups - mean) * valid
        variance = centred.square().sum(dim=(2, 3, 4), keepdim=True) / count
        normalised = (centred * (variance + self.eps).rsqrt()).flatten(1, 2)
        return normalised * self.weight[:, None, None] + self.bias[:, None, None]


class Lateral(nn.Module):
    """Projects a feature map of the backbone to the decoder's width."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 1)
        self.norm = MaskedGroupNorm(32 if out_channels % 32 == 0 else 4, out_channels)

    def forward(self, x: Tensor, padding: Tensor | None) -> Tensor:
        """Takes a feature map (N, C, H, W). Returns a feature map (N, C', H, W)."""
        return self.norm(self.conv(x), padding)


class QueryLayer(nn.Module):
    """Updates query positions by an MLP, and queries by cross-attention, self-attention and MLP."""

    def __init__(self, widths: DecoderWidths) -> None:
        super().__init__()
        dim = widths.dim
        self.adapt_position = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, dim))
        self.cross_attention = attention(widths)
        self.cross_norm = nn.LayerNorm(dim)
        self.self_attention = attention(widths)
        self.self_norm = nn.LayerNorm(dim)
        self.feed_forward = feed_forward(widths)
        self.feed_forward_norm = nn.LayerNorm(dim)
        self.dropout = nn.Dropout(widths.dropout)

    def forward(self, queries: Tensor, position: Tensor, level: LevelMap) -> tuple[Tensor, Tensor]:
        """Returns the updated queries and positions, (N, Q, C) each."""
        position = position + self.adapt_position(queries)
        gathered = self.cross_attention(
            queries + position, level.x + level.position, level.x, key_padding_mask=level.ignored
        )
        queries = self.cross_norm(queries + self.dropout(gathered))
        located = queries + position
        exchanged = self.self_attention(located, located, queries)
        queries = self.self_norm(queries + self.dropout(exchanged))
        queries = queries + self.dropout(self.feed_forward(queries))
        return self.feed_forward_norm(queries), position


class TransformerMobile(nn.Module):
    """The feature-map update of M-F+ blocks (stride 32): a transformer encoder layer."""

    def __init__(self, widths: DecoderWidths) -> None:
        super().__init__()
        self.attention = attention(widths)
        self.attention_norm = nn.LayerNorm(widths.dim)
        self.feed_forward = feed_forward(widths)
        self.feed_forward_norm = nn.LayerNorm(widths.dim)
        self.dropout = nn.Dropout(widths.dropout)

    def forward(self, level: LevelMap, queries: Tensor) -> Tensor:
        """Returns the updated feature map (N, HW, C). Does not use ``queries`` (N, Q, C)."""
        x = level.x
        located = x + level.position
        exchanged = self.attention(located, located, x, key_padding_mask=level.ignored)
        x = self.attention_norm(x + self.dropout(exchanged))
        return self.feed_forward_norm(x + self.dropout(self.feed_forward(x)))


class LiteMobile(nn.Module):
    """The feature-map update of M-F- blocks (strides 16, 8): a lite bottleneck without norms."""

    def __init__(self, widths: DecoderWidths) -> None:
        super().__init__()
        hidden = widths.dim * widths.expansion
        self.depthwise = depthwise(widths.dim, hidden, norm="")
        self.act = DynamicReLU(token_dim=widths.dim, channels=hidden)
        self.pointwise = pointwise(hidden, widths.dim, norm="")

    def forward(self, level: LevelMap, queries: Tensor) -> Tensor:
        """Returns the updated feature map (N, HW, C). ``queries`` are (N, Q, C).

        The first query determines the slopes of the dynamic ReLU.
        """
        image = zero_padding(level.as_image(level.x), level.padding)  # (N, C, H, W)
        hidden = self.act(self.depthwise(image), queries[:, 0])
        update = self.pointwise(hidden)  # (N, C, H, W)
        return level.x + update.flatten(2).transpose(1, 2)


class QueryToMap(nn.Module):
    """Bridge from queries to feature map: unprojected features of the map attend to the queries."""

    def __init__(self, widths: DecoderWidths) -> None:
        super().__init__()
        self.num_heads = widths.num_heads
        self.key = nn.Linear(widths.dim, widths.dim)
        self.value = nn.Linear(widths.dim, widths.dim)
        self.attend = DotProductAttention()

    def forward(self, level: LevelMap, queries: Tensor, position: Tensor) -> Tensor:
        """Takes queries and positions (N, Q, C). Returns the updated feature map (N, HW, C)."""
        # The feature map attends, so its positions are the queries of the attention.
        query = self._split_heads(level.x + level.position)
        key = self._split_heads(self.key(queries + position))
        value = self._split_heads(self.value(queries))
        return level.x + self.attend(query, key, value)

    def _split_heads(self, x: Tensor) -> Tensor:
        """Splits features (N, length, C) into heads (N, heads, length, C / heads)."""
        return x.unflatten(2, (self.num_heads, -1)).transpose(1, 2)


class DecoderBlock(nn.Module):
    """Updates the queries, then the feature map (except in the decoder's last block)."""

    def __init__(
        self,
        *,
        query_layer: QueryLayer,
        mobile: TransformerMobile | LiteMobile | None = None,
        query_to_map: QueryToMap | None = None,
    ) -> None:
        """Takes the query layer and, except in the last block, the feature-map layers."""
        super().__init__()
        self.query_layer = query_layer
        self.mobile = mobile
        self.query_to_map = query_to_map

    def forward(
        self, queries: Tensor, position: Tensor, level: LevelMap
    ) -> tuple[Tensor, Tensor, LevelMap]:
        """Returns the updated queries (N, Q, C), positions (N, Q, C) and feature map."""
        queries, position = self.query_layer(queries, position, level)
        if self.mobile is None or self.query_to_map is None:  # the last block
            return queries, position, level
        level = replace(level, x=self.mobile(level, queries))
        level = replace(level, x=self.query_to_map(level, queries, position))
        return queries, position, level
