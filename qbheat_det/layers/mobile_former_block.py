# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The Mobile-Former block and its four parts, and the block without tokens of the first stage.

Paper: "Mobile-Former: Bridging MobileNet and Transformer", Chen et al., arXiv:2108.05895, Sec. 3.1
and Fig. 3. Details follow the authors' public ImageNet code and the parameter counts of the QB-Heat
paper (Tables 1 and 5): Mobile->Former has a gate. In Former, keys and values are not projected,
norms come after the additions (post-norm), and the MLP has twice the width of the tokens.
"""

from collections.abc import Callable

from detectron2.layers import Conv2d, get_norm
from timm.layers import DropPath
from torch import Tensor, nn
from torch.nn import functional as F

from .dynamic_relu import DynamicReLU
from .padded_maps import halve, zero_padding

_BRIDGE_HEADS = 2
"""Attention heads of ``MobileToFormer`` and ``FormerToMobile``."""
_FORMER_HEADS = 4
Watcher = Callable[[Tensor], None]
"""A function that a layer calls with its attention weights, to record them."""


class MobileToFormer(nn.Module):
    """Bridge from feature map to tokens: tokens attend to pixels.

    Keys and values are the pixels themselves, without a projection.
    """

    def __init__(self, *, token_dim: int, channels: int) -> None:
        """Takes the tokens' width D, and the feature map's channels C, an even number."""
        super().__init__()
        self.watchers: list[Watcher] = []
        self.query = nn.Linear(token_dim, channels)
        self.gate = nn.Linear(token_dim, channels)
        self.project = nn.Linear(channels, token_dim)
        self.norm = nn.LayerNorm(token_dim)

    def forward(self, tokens: Tensor, x: Tensor, padding: Tensor | None = None) -> Tensor:
        """Takes tokens (N, M, D) and a feature map (N, C, H, W). Returns updated tokens (N, M, D).

        ``padding`` (N, 1, H, W) is True outside the images. Tokens do not attend to these pixels.
        """
        query = _split_heads(self.query(tokens), _BRIDGE_HEADS)  # (N, heads, M, C / heads)
        pixels = _split_pixels(x)  # (N, heads, C / heads, HW)
        logits = (query * query.shape[-1] ** -0.5) @ pixels  # (N, heads, M, HW)
        if padding is not None:
            masked = padding.flatten(2)[:, :, None]  # (N, 1, 1, HW)
            logits = logits.masked_fill(masked, float("-inf"))
        attention = logits.softmax(dim=-1)
        for watch in self.watchers:
            watch(attention.unflatten(-1, x.shape[-2:]))
        attended = attention @ pixels.transpose(-2, -1)  # (N, heads, M, C / heads)
        attended = attended.transpose(1, 2).flatten(2)  # (N, M, C)
        gate = 2 * F.hardsigmoid(self.gate(tokens))
        return self.norm(tokens + self.project(gate * attended))


class FormerToMobile(nn.Module):
    """Bridge from tokens to feature map: pixels attend to tokens.

    Queries are the pixels themselves, without a projection.
    """

    def __init__(self, *, token_dim: int, channels: int) -> None:
        """Takes the tokens' width D, and the feature map's channels C, an even number."""
        super().__init__()
        self.watchers: list[Watcher] = []
        self.key = nn.Linear(token_dim, channels)
        self.value = nn.Linear(token_dim, channels)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        """Takes a map (N, C, H, W) and tokens (N, M, D). Returns the updated map (N, C, H, W)."""
        key = _split_heads(self.key(tokens), _BRIDGE_HEADS)  # (N, heads, M, C / heads)
        value = _split_heads(self.value(tokens), _BRIDGE_HEADS)
        # The product has tokens as rows, although pixels attend to tokens. With pixels as rows, the
        # feature map would have to be transposed and copied.
        logits = (key * key.shape[-1] ** -0.5) @ _split_pixels(x)  # (N, heads, M, HW)
        attention = logits.softmax(dim=-2)
        for watch in self.watchers:
            watch(attention.unflatten(-1, x.shape[-2:]))
        update = value.transpose(-2, -1) @ attention  # (N, heads, C / heads, HW)
        return x + update.view_as(x)


class Former(nn.Module):
    """Transformer layer on tokens: self-attention with unprojected keys and values, and an MLP."""

    def __init__(self, *, token_dim: int, drop_path: float) -> None:
        """Takes the tokens' width D, divisible by 4, and the stochastic depth rate."""
        super().__init__()
        self.query = nn.Linear(token_dim, token_dim)
        self.project = nn.Linear(token_dim, token_dim)
        self.attention_norm = nn.LayerNorm(token_dim)
        self.mlp = nn.Sequential(
            nn.Linear(token_dim, 2 * token_dim), nn.GELU(), nn.Linear(2 * token_dim, token_dim)
        )
        self.mlp_norm = nn.LayerNorm(token_dim)
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(self, tokens: Tensor) -> Tensor:
        """Takes tokens (N, M, D) and returns updated tokens (N, M, D)."""
        query = _split_heads(self.query(tokens), _FORMER_HEADS)
        memory = _split_heads(tokens, _FORMER_HEADS)
        attended = F.scaled_dot_product_attention(query, memory, memory)
        attended = self.project(attended.transpose(1, 2).flatten(2))
        tokens = self.attention_norm(tokens + self.drop_path(attended))
        return self.mlp_norm(tokens + self.drop_path(self.mlp(tokens)))


def pointwise(in_channels: int, out_channels: int, norm: str) -> Conv2d:
    """Builds a 1x1 convolution without bias, followed by a norm."""
    return Conv2d(in_channels, out_channels, 1, bias=False, norm=get_norm(norm, out_channels))


def depthwise(in_channels: int, out_channels: int, norm: str, stride: int = 1) -> Conv2d:
    """Builds a 3x3 depthwise convolution without bias, followed by a norm."""
    return Conv2d(
        in_channels,
        out_channels,
        3,
        stride=stride,
        padding=1,
        groups=in_channels,
        bias=False,
        norm=get_norm(norm, out_channels),
    )


class LiteBottleneck(nn.Module):
    """A depthwise convolution, ReLU6 and a pointwise convolution, for stages without tokens.

    Adds the input if it has the shape of the output. Takes tokens as ``MobileFormerBlock`` does,
    and returns them unchanged.
    """

    def __init__(
        self, *, in_channels: int, hidden: int, out_channels: int, norm: str, stride: int = 1
    ) -> None:
        """``hidden`` is a multiple of ``in_channels``. ``norm`` is a name such as "BN"."""
        super().__init__()
        self.stride = stride
        self.depthwise = depthwise(in_channels, hidden, norm, stride)
        self.pointwise = pointwise(hidden, out_channels, norm)
        self.has_identity = stride == 1 and in_channels == out_channels

    def forward(
        self, x: Tensor, tokens: Tensor, padding: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Takes a map (N, C, H, W) and tokens (N, M, D). Returns a map (N, C', H', W') and tokens.

        ``padding`` (N, 1, H, W) is True outside the images.
        """
        hidden = F.relu6(self.depthwise(zero_padding(x, padding)))
        out = self.pointwise(hidden)
        if self.has_identity:
            out = x + out
        return out, tokens


class Mobile(nn.Module):
    """Inverted bottleneck with dynamic ReLU. Adds the input if it has the width of the output."""

    stride = 1

    def __init__(
        self,
        *,
        in_channels: int,
        hidden: int,
        out_channels: int,
        token_dim: int,
        norm: str,
        drop_path: float = 0.0,
    ) -> None:
        """``token_dim`` is the tokens' width D. ``norm`` is a name for Detectron2's ``get_norm``.

        ``drop_path`` is the rate at which the residual branch is dropped.
        """
        super().__init__()
        self.expand = pointwise(in_channels, hidden, norm)
        self.expand_act = DynamicReLU(token_dim=token_dim, channels=hidden)
        self.depthwise = depthwise(hidden, hidden, norm)
        self.depthwise_act = DynamicReLU(token_dim=token_dim, channels=hidden)
        self.reduce = pointwise(hidden, out_channels, norm)
        self.has_identity = in_channels == out_channels
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(self, x: Tensor, token: Tensor, padding: Tensor | None = None) -> Tensor:
        """Takes a feature map (N, C, H, W) and a token (N, D). Returns a map (N, C', H, W).

        ``padding`` (N, 1, H, W) is True outside the images.
        """
        hidden = self.expand_act(self.expand(x), token)
        hidden = self.depthwise_act(self.depthwise(zero_padding(hidden, padding)), token)
        out = self.reduce(hidden)
        if self.has_identity:
            return x + self.drop_path(out)
        return out


class DownMobile(nn.Module):
    """Two pairs of depthwise and pointwise convolutions. The first pair halves the resolution, and
    the second pair is a residual branch."""

    stride = 2

    def __init__(
        self,
        *,
        in_channels: int,
        hidden: int,
        out_channels: int,
        second_hidden: int,
        token_dim: int,
        norm: str,
        drop_path: float = 0.0,
    ) -> None:
        """
        Args:
            in_channels: channels of the input.
            hidden: channels after the first depthwise convolution, a multiple of ``in_channels``.
            out_channels: channels of the output of each pair.
            second_hidden: channels after the second depthwise convolution, a multiple of
                ``out_channels``.
            token_dim: the tokens' width D.
            norm: a name for Detectron2's ``get_norm``.
            drop_path: rate at which the second pair is dropped.
        """
        super().__init__()
        self.down = depthwise(in_channels, hidden, norm, stride=2)
        self.down_act = DynamicReLU(token_dim=token_dim, channels=hidden)
        self.down_reduce = pointwise(hidden, out_channels, norm)
        self.depthwise = depthwise(out_channels, second_hidden, norm)
        self.depthwise_act = DynamicReLU(token_dim=token_dim, channels=second_hidden)
        self.reduce = pointwise(second_hidden, out_channels, norm)
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(self, x: Tensor, token: Tensor, padding: Tensor | None = None) -> Tensor:
        """Takes a map (N, C, H, W) and a token (N, D). Returns (N, C', ceil(H / 2), ceil(W / 2)).

        ``padding`` (N, 1, H, W) is True outside the images.
        """
        hidden = self.down_act(self.down(zero_padding(x, padding)), token)
        y = self.down_reduce(hidden)  # (N, C', H / 2, W / 2)
        hidden = self.depthwise_act(self.depthwise(zero_padding(y, halve(padding))), token)
        return y + self.drop_path(self.reduce(hidden))


class MobileFormerBlock(nn.Module):
    """A block of four parts: Mobile->Former, Former, Mobile and Mobile<-Former."""

    token_path = ("mobile_to_former", "former")
    """Names of the children that compute the tokens."""

    def __init__(
        self,
        *,
        mobile: Mobile | DownMobile,
        former: Former,
        to_former: MobileToFormer,
        to_mobile: FormerToMobile,
    ) -> None:
        super().__init__()
        self.mobile_to_former = to_former
        self.former = former
        self.mobile = mobile
        self.former_to_mobile = to_mobile
        self.stride = mobile.stride

    def forward(
        self, x: Tensor, tokens: Tensor, padding: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Takes a map (N, C, H, W) and tokens (N, M, D). Returns a map (N, C', H', W') and tokens.

        ``padding`` (N, 1, H, W) is True outside the images.
        """
        tokens = self.mobile_to_former(tokens, x, padding)
        tokens = self.former(tokens)
        first_token = tokens[:, 0]  # (N, D), determines the slopes of the dynamic ReLUs
        x = self.mobile(x, first_token, padding)
        x = self.former_to_mobile(x, tokens)
        return x, tokens


def _split_heads(x: Tensor, num_heads: int) -> Tensor:
    """Splits features (N, L, C) into heads (N, heads, L, C / heads)."""
    return x.unflatten(2, (num_heads, -1)).transpose(1, 2)


def _split_pixels(x: Tensor) -> Tensor:
    """Splits a feature map (N, C, H, W) into the bridges' heads (N, heads, C / heads, HW)."""
    return x.flatten(2).unflatten(1, (_BRIDGE_HEADS, -1))
