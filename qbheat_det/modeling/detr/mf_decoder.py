# Copyright (c) qbheat_det contributors. Apache-2.0.
"""MF-DETR's decoder: Mobile-Former blocks between object queries and a map, coarse to fine.

Paper: QB-Heat, arXiv:2211.13228, Sec. 5, B.2 and Table 13 (MF-Dec-522 and MF-Dec-211). The map
starts from the backbone's stride-16 output taken down to stride 32 and comes up to 16 and 8, where
the backbone's maps are added.

Not printed in the paper: the laterals (1x1 convolution and GroupNorm, added after up-sampling) and
the last block's missing map side; both follow from the printed counts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from detectron2.layers import ShapeSpec
from torch import Tensor, nn
from torch.nn import functional as F

from qbheat_det.layers import (
    DynamicReLU,
    SinePositionEncoding,
    depthwise,
    halve,
    pointwise,
    resize_bilinear,
    zero_padding,
)

from .decoder_block import (
    DecoderBlock,
    DecoderWidths,
    LevelMap,
    LiteMobile,
    QueryLayer,
    QueryToMap,
    TransformerMobile,
)


@dataclass(frozen=True)
class QuerySet:
    """E further queries for each of N images, and what they may not attend to.

    ``content`` and ``position`` are (N, E, C). ``masked`` (N or 1, E, E) is True where a query
    (row) may not attend to another, ``reads_own`` (E,) where it attends to the decoder's own.
    """

    content: Tensor
    position: Tensor
    masked: Tensor
    reads_own: Tensor

    def mask(self, num_own: int) -> Tensor:
        """Returns (N, Q + E, Q + E), True where a query (row) may not attend to another.

        Args:
            num_own: Q, of the decoder's own queries, which come first and attend to none of these.
        """
        num_images, num_extra = self.content.shape[:2]
        own = torch.arange(num_own + num_extra, device=self.masked.device) >= num_own
        above = own.expand(num_images, num_own, -1)
        left = ~self.reads_own[:, None].expand(num_images, -1, num_own)
        below = torch.cat([left, self.masked.expand(num_images, -1, -1)], dim=2)
        return torch.cat([above, below], dim=1)


class SeparableConv(nn.Module):
    """Depthwise 3x3, norm, ReLU6, pointwise, norm."""

    def __init__(self, in_channels: int, out_channels: int, norm: str, stride: int = 1) -> None:
        super().__init__()
        self.depthwise = depthwise(in_channels, in_channels, norm, stride=stride)
        self.pointwise = pointwise(in_channels, out_channels, norm)

    def forward(self, x: Tensor, padding: Tensor | None) -> Tensor:
        """(N, C, H, W) to (N, C', ceil(H / stride), ceil(W / stride))."""
        hidden: Tensor = self.pointwise(F.relu6(self.depthwise(zero_padding(x, padding))))
        return hidden


class MaskedGroupNorm(nn.GroupNorm):
    """GroupNorm with statistics over the images of a padded batch, without the padding."""

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        """
        Args:
            x: (N, C, H, W).
            padding: (N, 1, H, W), True where there is no image, or None.

        Returns:
            (N, C, H, W), within each image the result of GroupNorm for it alone.
        """
        if padding is None:
            return super().forward(x)
        valid = (~padding).to(x.dtype)[:, :, None]  # (N, 1, 1, H, W)
        groups = zero_padding(x, padding).unflatten(1, (self.num_groups, -1))
        count = valid.sum(dim=(2, 3, 4), keepdim=True) * groups.shape[2]
        mean = groups.sum(dim=(2, 3, 4), keepdim=True) / count
        centred = (groups - mean) * valid
        variance = centred.square().sum(dim=(2, 3, 4), keepdim=True) / count
        normalised = (centred * (variance + self.eps).rsqrt()).flatten(1, 2)
        return normalised * self.weight[:, None, None] + self.bias[:, None, None]


class Lateral(nn.Module):
    """A backbone map brought to the decoder's width."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 1)
        self.norm = MaskedGroupNorm(32 if out_channels % 32 == 0 else 4, out_channels)

    def forward(self, x: Tensor, padding: Tensor | None) -> Tensor:
        """(N, C, H, W) to (N, C', H, W)."""
        normalised: Tensor = self.norm(self.conv(x), padding)
        return normalised


class BoxHead(nn.Module):
    """Three linear layers, then a sigmoid."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.hidden = nn.ModuleList(nn.Linear(dim, dim) for _ in range(2))
        self.last = nn.Linear(dim, 4)

    def forward(self, queries: Tensor) -> Tensor:
        """(..., C) to (..., 4), cxcywh in [0, 1] of the unpadded image."""
        for layer in self.hidden:
            queries = F.relu(layer(queries))
        # Float32 under autocast: half precision has too few steps for a pixel in [0, 1].
        return self.last(queries).float().sigmoid()


class MFDecoder(nn.Module):
    """Object queries refined over three scales, with a prediction after every block."""

    def __init__(
        self,
        *,
        input_shape: Sequence[ShapeSpec],
        num_classes: int,
        num_queries: int = 100,
        num_blocks: Sequence[int] = (5, 2, 2),
        widths: DecoderWidths | None = None,
        norm: str = "BN",
    ) -> None:
        """
        Args:
            input_shape: shapes of the backbone's maps at strides 8 and 16, in this order.
            num_classes: K, without the no-object class.
            num_queries: Q.
            num_blocks: blocks at strides 32 (M-F+), 16 and 8 (M-F-); (5, 2, 2) and (2, 1, 1) are
                the paper's.
            widths: sizes of the blocks, the paper's by default.
            norm: name for ``detectron2.layers.get_norm``, of the down- and up-convolutions.

        Raises:
            ValueError: the input strides are not 8 and 16, or there is no query, or a level has no
                block.
        """
        super().__init__()
        if [shape.stride for shape in input_shape] != [8, 16]:
            raise ValueError(
                "MF-DETR reads maps at strides 8 and 16, finest first, not "
                f"{[shape.stride for shape in input_shape]}"
            )
        if len(num_blocks) != 3 or min(num_blocks) < 1:
            raise ValueError(f"NUM_BLOCKS wants three counts >= 1, not {list(num_blocks)}")
        if num_queries < 1:
            raise ValueError(f"NUM_OBJECT_QUERIES is at least 1, not {num_queries}")
        widths = widths or DecoderWidths()
        fine, coarse = (cast(int, shape.channels) for shape in input_shape)
        self.position_encoding = SinePositionEncoding(channels=widths.dim)
        self.num_queries, self.num_heads = num_queries, widths.num_heads
        self.query_position = nn.Embedding(num_queries, widths.dim)
        self.down = SeparableConv(coarse, widths.dim, norm, stride=2)
        self.up = nn.ModuleList(SeparableConv(widths.dim, widths.dim, norm) for _ in range(2))
        self.laterals = nn.ModuleList(Lateral(channels, widths.dim) for channels in (coarse, fine))
        self.levels = nn.ModuleList(
            nn.ModuleList(
                _build_block(widths, transformer=level == 0, last=level == 2 and index == count - 1)
                for index in range(count)
            )
            for level, count in enumerate(num_blocks)
        )
        self.class_embed = nn.Linear(widths.dim, num_classes + 1)
        self.bbox_embed = BoxHead(widths.dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Xavier for linear layers, dynamic ReLUs as plain ReLU, boxes at the image's centre."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        for module in self.modules():
            if isinstance(module, DynamicReLU):
                module.reset_parameters()
        nn.init.normal_(self.query_position.weight)
        nn.init.zeros_(self.bbox_embed.last.weight)

    def forward(
        self,
        features: Sequence[Tensor],
        padding: Tensor | None = None,
        extra: QuerySet | None = None,
    ) -> dict[str, Tensor]:
        """
        Args:
            features: maps at strides 8 and 16, (N, C, H, W) each.
            padding: mask (N, 1, H, W) at stride 8, True where there is no image, or None.
            extra: E further queries for each image, which do not influence the decoder's own.

        Returns:
            "pred_logits" (L, N, Q + E, K + 1), the last class being "no object", and "pred_boxes"
            (L, N, Q + E, 4), cxcywh in [0, 1] of the unpadded image, further queries last. L
            counts the blocks while training and is 1, the last block, otherwise.
        """
        states = self.refine_queries(features, padding, extra)
        return self.predict(states if self.training else states[-1:])

    def refine_queries(
        self,
        features: Sequence[Tensor],
        padding: Tensor | None = None,
        extra: QuerySet | None = None,
    ) -> Tensor:
        """As ``forward``, but returns the queries after every block: (L, N, Q + E, C)."""
        # Channels last: convolutions and attention then read the same memory, without copies.
        fine, coarse = (x.contiguous(memory_format=torch.channels_last) for x in features)
        masks = [halve(halve(padding)), halve(padding), padding]  # at strides 32, 16, 8
        position = self.query_position.weight.expand(fine.shape[0], -1, -1)
        queries = torch.zeros_like(position)
        mask = None
        if extra is not None:
            queries = torch.cat([queries, extra.content.to(queries)], dim=1)
            position = torch.cat([position, extra.position.to(position)], dim=1)
            # One copy for each head, the layout of PyTorch's masks for a batch.
            mask = extra.mask(self.num_queries).repeat_interleave(self.num_heads, dim=0)
        x = self.down(coarse, masks[1])
        states: list[Tensor] = []
        for scale, blocks in enumerate(self.levels):
            if scale:
                x = self._go_up(scale, x, (coarse, fine)[scale - 1], masks)
            x = x.contiguous(memory_format=torch.channels_last)
            if x.requires_grad:
                x.register_hook(_as_rows)
            level = LevelMap(
                x=x.flatten(2).transpose(1, 2).contiguous(),
                position=self.position_encoding(x.shape[-2:], masks[scale]),
                size=x.shape[-2:],
                padding=masks[scale],
            )
            for block in cast(Sequence[DecoderBlock], blocks):
                queries, position, level = block(
                    queries, position, level, mask=mask, num_read=self.num_queries
                )
                states.append(queries)
            x = level.as_image(level.x)
        return torch.stack(states)

    def predict(self, queries: Tensor) -> dict[str, Tensor]:
        """Queries (..., Q, C) to "pred_logits" (..., Q, K + 1) and "pred_boxes" (..., Q, 4)."""
        return {
            "pred_logits": self.class_embed(queries),
            "pred_boxes": self.bbox_embed(queries),
        }

    def _go_up(
        self, scale: int, x: Tensor, backbone_map: Tensor, masks: Sequence[Tensor | None]
    ) -> Tensor:
        size, below, here = backbone_map.shape[-2:], masks[scale - 1], masks[scale]
        x = self.up[scale - 1](resize_bilinear(x, size, below, here), here)
        return cast(Tensor, x + self.laterals[scale - 1](backbone_map, here))


def _as_rows(gradient: Tensor) -> Tensor:
    # PyTorch's BatchNorm on the CPU is fast if its gradient has the layout of its input. For one
    # image the gradient is wrong if the stride between images is not H * W * C (PyTorch 2.15).
    _, channels, height, width = gradient.shape
    rows = gradient.contiguous(memory_format=torch.channels_last)
    steps = (height * width * channels, 1, width * channels, channels)
    return rows.as_strided(rows.shape, steps)


def _build_block(widths: DecoderWidths, *, transformer: bool, last: bool) -> DecoderBlock:
    query_layer = QueryLayer(widths)
    if last:  # nothing reads the map after it
        return DecoderBlock(query_layer=query_layer)
    mobile = TransformerMobile(widths) if transformer else LiteMobile(widths)
    return DecoderBlock(query_layer=query_layer, mobile=mobile, query_to_map=QueryToMap(widths))
