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
"""A callback of ``attention.read_attention``, which a layer calls with its attention weights."""


class MobileToFormer(nn.Module):
    """Bridge from feature map to tokens: tokens attend to pixels, which are not projected."""

    def __init__(self, *, token_dim: int, channels: int) -> None:
        """Takes the tokens' width D, and the map's channels C, an even number."""
        super().__init__()
        self.watchers: list[Watcher] = []
        self.query = nn.Linear(token_dim, channels)
        self.gate = nn.Linear(token_dim, channels)
        self.project = nn.Linear(channels, token_dim)
        self.norm = nn.LayerNorm(token_dim)

    def forward(self, tokens: Tensor, x: Tensor, padding: Tensor | None = None) -> Tensor:
        """Takes tokens (N, M, D) and a feature map (N, C, H, W). Returns updated tokens (N, M, D).

        ``padding`` (N, 1, H, W) is True outside the images. Padded pixels get no weight.
        """
        query = _split_heads(self.query(tokens), _BRIDGE_HEADS)  # (N, heads, M, C / heads)
        pixels = _split_pixels(x)  # (N, heads, C / heads, HW)
        logits = (query * query.shape[-1] ** -0.5) @ pixels  # (N, heads, M, HW)
        if padding is not None:
            logits = logits.masked_fill(padding.flatten(2)[:, :, None], float("-inf"))
        attention = logits.softmax(dim=-1)
        for watch in self.watchers:
            watch(attention.unflatten(-1, x.shape[-2:]))
        attended = (attention @ pixels.transpose(-2, -1)).transpose(1, 2).flatten(2)  # (N, M, C)
        gate = 2 * F.hardsigmoid(self.gate(tokens))
        return self.norm(tokens + self.project(gate * attended))


class FormerToMobile(nn.Module):
    """Bridge from tokens to feature map: pixels, which are not projected, attend to tokens."""

    def __init__(self, *, token_dim: int, channels: int) -> None:
        """Takes the tokens' width D, and the map's channels C, an even number."""
        super().__init__()
        self.watchers: list[Watcher] = []
        self.key = nn.Linear(token_dim, channels)
        self.value = nn.Linear(token_dim, channels)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        """Takes a map (N, C, H, W) and tokens (N, M, D). Returns the updated map (N, C, H, W)."""
        key = _split_heads(self.key(tokens), _BRIDGE_HEADS)  # (N, heads, M, C / heads)
        value = _split_heads(self.value(tokens), _BRIDGE_HEADS)
        # Tokens are the rows of the product, so that no copy of the feature map is needed.
        logits = (key * key.shape[-1] ** -0.5) @ _split_pixels(x)  # (N, heads, M, HW)
        attention = logits.softmax(dim=-2)
        for watch in self.watchers:
            watch(attention.unflatten(-1, x.shape[-2:]))
        return x + (value.transpose(-2, -1) @ attention).view_as(x)


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
    """A depthwise convolution, ReLU6 and a pointwise convolution. Returns the tokens unchanged.

    Adds the input if it has the shape of the output.
    """

    def __init__(
        self, *, in_channels: int, hidden: int, out_channels: int, norm: str, stride: int = 1
    ) -> None:
        """``hidden`` is a multiple of ``in_channels``. For ``norm``, see ``Mobile``."""
        super().__init__()
        self.stride = stride
        self.depthwise = depthwise(in_channels, hidden, norm, stride)
        self.pointwise = pointwise(hidden, out_channels, norm)
        self.has_identity = stride == 1 and in_channels == out_channels

    def forward(
        self, x: Tensor, tokens: Tensor, padding: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """See ``MobileFormerBlock.forward``."""
        hidden = F.relu6(self.depthwise(zero_padding(x, padding)))
        out = self.pointwise(hidden)
        return x + out if self.has_identity else out, tokens


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
        """``token_dim`` is the tokens' width D. ``norm`` is passed to Detectron2's ``get_norm``."""
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
        return x + self.drop_path(out) if self.has_identity else out


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
        """See ``Mobile``. Each depthwise convolution has its own hidden width.

        ``hidden`` is a multiple of ``in_channels``, and ``second_hidden`` of ``out_channels``.
        ``drop_path`` is the rate at which the second pair is dropped.
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
        """See ``Mobile.forward``. Returns a map (N, C', ceil(H / 2), ceil(W / 2))."""
        y = self.down_reduce(self.down_act(self.down(zero_padding(x, padding)), token))
        hidden = self.depthwise_act(self.depthwise(zero_padding(y, halve(padding))), token)
        return y + self.drop_path(self.reduce(hidden))


class MobileFormerBlock(nn.Module):
    """A block of four parts: Mobile->Former, Former, Mobile and Mobile<-Former."""

    token_path = ("mobile_to_former", "former")
    """See ``get_token_parameters`` in ``modeling/contracts.py``."""

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
        """Takes a map (N, C, H, W) and tokens (N, M, D). Returns (N, C', H', W') and new tokens."""
        tokens = self.former(self.mobile_to_former(tokens, x, padding))
        x = self.mobile(x, tokens[:, 0], padding)
        return self.former_to_mobile(x, tokens), tokens


def _split_heads(x: Tensor, num_heads: int) -> Tensor:
    """Splits features (N, L, C) into heads (N, heads, L, C / heads)."""
    return x.unflatten(2, (num_heads, -1)).transpose(1, 2)


def _split_pixels(x: Tensor) -> Tensor:
    """Splits a feature map (N, C, H, W) into the bridges' heads (N, heads, C / heads, HW)."""
    return x.flatten(2).unflatten(1, (_BRIDGE_HEADS, -1))
