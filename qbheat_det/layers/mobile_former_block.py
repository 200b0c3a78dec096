# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The Mobile-Former block and the token-free block before it.

Paper: "Mobile-Former", arXiv:2108.05895, Sec. 3.1 and Fig. 3; widths from Table 8 of the QB-Heat
paper. Deviations: none known; the second hidden width of a down-sampling block is not printed and
is given by the caller.
"""

from detectron2.layers import get_norm
from timm.layers import DropPath
from torch import Tensor, nn
from torch.nn import functional as F

from .convolutions import DepthwiseConv2d, NormedConv2d
from .cross_attention import FormerToMobile, MobileToFormer
from .dynamic_relu import DynamicReLU
from .former import Former
from .padding import halve, zero_padding


def pointwise(in_channels: int, out_channels: int, norm: str) -> NormedConv2d:
    """A 1x1 convolution without bias, then a norm."""
    norm_layer = get_norm(norm, out_channels)
    return NormedConv2d(in_channels, out_channels, 1, bias=False, norm=norm_layer)


def depthwise(in_channels: int, out_channels: int, norm: str, stride: int = 1) -> DepthwiseConv2d:
    """A 3x3 convolution with one input channel an output, without bias, then a norm."""
    return DepthwiseConv2d(
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
    """Depthwise, ReLU6, pointwise, plus the input; the tokens pass by. First stage only."""

    stride = 1

    def __init__(self, *, channels: int, hidden: int, norm: str) -> None:
        """
        Args:
            channels: C of input and output.
            hidden: channels between the two convolutions, a multiple of ``channels``.
            norm: name for ``detectron2.layers.get_norm``.
        """
        super().__init__()
        self.depthwise = depthwise(channels, hidden, norm)
        self.pointwise = pointwise(hidden, channels, norm)

    def forward(
        self, x: Tensor, tokens: Tensor, padding: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Same contract as ``MobileFormerBlock.forward``."""
        hidden = F.relu6(self.depthwise(zero_padding(x, padding)))
        return x + self.pointwise(hidden), tokens


class Mobile(nn.Module):
    """Inverted bottleneck with dynamic ReLU; identity where the widths agree."""

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
        """
        Args:
            in_channels: C of the input.
            hidden: expanded width.
            out_channels: C of the output.
            token_dim: width D of the token that drives the dynamic ReLUs.
            norm: name for ``detectron2.layers.get_norm``.
            drop_path: probability to drop the branch beside the identity while training.
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
        """
        Args:
            x: (N, C, H, W).
            token: (N, D).
            padding: (N, 1, H, W), True where the map holds no image.

        Returns:
            (N, C', H, W).
        """
        hidden = self.expand_act(self.expand(x), token)
        hidden = self.depthwise_act(self.depthwise(zero_padding(hidden, padding)), token)
        out = self.reduce(hidden)
        return x + self.drop_path(out) if self.has_identity else out


class DownMobile(nn.Module):
    """Two depthwise-pointwise pairs: the first halves the map, the second adds to its result."""

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
            in_channels: C of the input.
            hidden: width after the first depthwise convolution, a multiple of ``in_channels``.
            out_channels: C of the output.
            second_hidden: width after the second one, a multiple of ``out_channels``.
            token_dim: width D of the token that drives the dynamic ReLUs.
            norm: name for ``detectron2.layers.get_norm``.
            drop_path: probability to drop the second pair while training.
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
        """As ``Mobile.forward``, to (N, C', ceil(H / 2), ceil(W / 2))."""
        y = self.down_reduce(self.down_act(self.down(zero_padding(x, padding)), token))
        hidden = self.depthwise_act(self.depthwise(zero_padding(y, halve(padding))), token)
        return y + self.drop_path(self.reduce(hidden))


class MobileFormerBlock(nn.Module):
    """Mobile->Former, Former, Mobile, Mobile<-Former."""

    def __init__(
        self,
        *,
        mobile: Mobile | DownMobile,
        former: Former,
        to_former: MobileToFormer,
        to_mobile: FormerToMobile,
    ) -> None:
        """
        Args:
            mobile: convolutions on the map.
            former: transformer layer on the tokens.
            to_former: bridge that reads the block's input map.
            to_mobile: bridge that writes to the block's output map.
        """
        super().__init__()
        self.mobile_to_former = to_former
        self.former = former
        self.mobile = mobile
        self.former_to_mobile = to_mobile
        self.stride = mobile.stride

    def forward(
        self, x: Tensor, tokens: Tensor, padding: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """
        Args:
            x: (N, C, H, W).
            tokens: (N, M, D).
            padding: (N, 1, H, W), True where the map holds no image.

        Returns:
            (N, C', H', W') and (N, M, D).
        """
        tokens = self.former(self.mobile_to_former(tokens, x, padding))
        x = self.mobile(x, tokens[:, 0], padding)
        return self.former_to_mobile(x, tokens), tokens
