# Copyright (c) qbheat_det contributors. Apache-2.0.
"""MF-DETR's decoder: Mobile-Former blocks on object queries and a feature map, coarse to fine.

Paper: QB-Heat, arXiv:2211.13228, Sec. 5, B.2 and Table 13 (MF-Dec-522 and MF-Dec-211). The feature
map starts at stride 32, computed from the backbone's output at stride 16. It is upsampled to
strides 16 and 8, where the backbone's outputs are added.

The paper does not describe the lateral layers (1x1 convolution and GroupNorm, added after
upsampling). It also does not state that the last block does not update the feature map. Both
details follow from the parameter counts in the paper.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from detectron2.layers import ShapeSpec
from torch import Tensor, nn
from torch.nn import functional as F

from qbheat_det.layers import DynamicReLU, SinePositionEncoding, halve, resize_bilinear
from qbheat_det.modeling.checks import check_value

from .decoder_block import (
    DecoderBlock,
    DecoderWidths,
    Lateral,
    LevelMap,
    LiteMobile,
    QueryLayer,
    QueryToMap,
    SeparableConv,
    TransformerMobile,
)
from .query_selection import QuerySelection, refine_boxes


class BoxHead(nn.Module):
    """Predicts the boxes of queries by an MLP of three linear layers and a sigmoid."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.hidden = nn.ModuleList(nn.Linear(dim, dim) for _ in range(2))
        self.last = nn.Linear(dim, 4)

    def forward(self, queries: Tensor) -> Tensor:
        """Maps queries (..., C) to boxes (..., 4), cxcywh in [0, 1] of the unpadded image."""
        return self.deltas(queries).sigmoid()

    def deltas(self, queries: Tensor) -> Tensor:
        """Maps queries (..., C) to the logits of boxes (..., 4), before the sigmoid."""
        for layer in self.hidden:
            queries = F.relu(layer(queries))
        # Float32 under autocast, because half precision in [0, 1] is too coarse for pixels.
        return self.last(queries).float()


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
        selection: QuerySelection | None = None,
    ) -> None:
        """
        Args:
            input_shape: shapes of the backbone's outputs at strides 8 and 16, and optionally 32, in
                this order.
            num_classes: K, without the no-object class.
            num_queries: Q, the number of object queries.
            num_blocks: number of blocks at strides 32 (M-F+), 16 and 8 (M-F-). The paper uses
                (5, 2, 2) and (2, 1, 1).
            widths: sizes of the blocks, by default as in the paper.
            norm: norm of the down- and up-convolutions, a name for Detectron2's ``get_norm`` such
                as "BN".
            selection: selects the queries from the feature maps. By default, queries are learned.

        Raises:
            ValueError: invalid input strides, no query, or a level without blocks.
        """
        super().__init__()
        strides = [shape.stride for shape in input_shape]
        if strides not in ([8, 16], [8, 16, 32]):
            raise ValueError(
                f"MF-DETR reads maps at strides 8, 16 and optionally 32, not {strides}"
            )
        has_blocks = len(num_blocks) == 3 and min(num_blocks) >= 1
        check_value(has_blocks, "MF_DETR.NUM_BLOCKS", list(num_blocks), "three counts from 1 on")
        check_value(num_queries >= 1, "MF_DETR.NUM_OBJECT_QUERIES", num_queries, "at least 1")
        if widths is None:
            widths = DecoderWidths()
        channels = [cast(int, shape.channels) for shape in input_shape]
        self.position_encoding = SinePositionEncoding(channels=widths.dim)
        self.num_queries = num_queries
        self.selection = selection
        if selection is None:
            self.query_position = nn.Embedding(num_queries, widths.dim)
        self.down = SeparableConv(channels[1], widths.dim, norm, stride=2)
        self.up = nn.ModuleList(SeparableConv(widths.dim, widths.dim, norm) for _ in range(2))
        # At strides 16 and 8.
        self.laterals = nn.ModuleList(
            [Lateral(channels[1], widths.dim), Lateral(channels[0], widths.dim)]
        )
        self.coarsest: Lateral | None = None
        if len(channels) == 3:  # the backbone has an output at stride 32
            self.coarsest = Lateral(channels[2], widths.dim)
        self.levels = nn.ModuleList()
        for level, count in enumerate(num_blocks):
            blocks = nn.ModuleList()
            for index in range(count):
                is_last = level == 2 and index == count - 1
                blocks.append(_build_block(widths, is_coarsest=level == 0, is_last=is_last))
            self.levels.append(blocks)
        self.class_embed = nn.Linear(widths.dim, num_classes + 1)
        self.bbox_embed = BoxHead(widths.dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initializes linear layers by Xavier, dynamic ReLUs as ReLU, boxes at the image center."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        for module in self.modules():
            if isinstance(module, DynamicReLU):
                module.reset_parameters()
        nn.init.zeros_(self.bbox_embed.last.weight)
        if self.selection is None:
            nn.init.normal_(self.query_position.weight)
        else:
            # With zeros, the initial predictions are those of the selected positions.
            nn.init.zeros_(self.class_embed.weight)
            self.selection.reset_parameters()

    def forward(self, features: Sequence[Tensor], padding: Tensor | None = None) -> dict[str, Any]:
        """Returns "pred_logits" (L, N, Q, K + 1) and "pred_boxes" (L, N, Q, 4).

        In training, these are the predictions of all L blocks. In inference, L is 1: only the last
        block predicts. Boxes are cxcywh in [0, 1] of the unpadded image. In training with a
        ``selection``, the dict also has the "proposals" from which queries are selected.

        Args:
            features: outputs (N, C, H, W) of the backbone, finest first.
            padding: mask (N, 1, H, W) at stride 8, True outside the images, or None.
        """
        maps = self.prepare_maps(features, padding)
        if self.selection is None:
            position = self.query_position.weight.expand(features[0].shape[0], -1, -1)
            states = self._refine(maps, torch.zeros_like(position), position)
            return {"pred_logits": self.class_embed(states), "pred_boxes": self.bbox_embed(states)}
        proposals = self.selection.propose(maps.merged(), maps.masks)
        selected = self.selection.select(proposals)
        states = self._refine(maps, selected.content, selected.position)
        outputs: dict[str, Any] = {
            "pred_logits": selected.logits + self.class_embed(states),
            "pred_boxes": refine_boxes(selected.boxes, self.bbox_embed.deltas(states)),
        }
        if self.training:
            outputs["proposals"] = proposals
        return outputs

    def prepare_maps(self, features: Sequence[Tensor], padding: Tensor | None) -> "DecoderMaps":
        """Projects the backbone's outputs to the decoder's width. Returns the coarsest map first.

        Takes the arguments of ``forward``.
        """
        # In channels-last format, convolutions and attention read the same memory without copies.
        maps = [x.contiguous(memory_format=torch.channels_last) for x in features]
        masks = [halve(halve(padding)), halve(padding), padding]  # at strides 32, 16, 8
        # The map at stride 32 is computed from the backbone's output at stride 16.
        coarsest = self.down(maps[1], masks[1])
        if self.coarsest is not None:
            coarsest = coarsest + self.coarsest(maps[2], masks[0])
        coarse = self.laterals[0](maps[1], masks[1])
        fine = self.laterals[1](maps[0], masks[2])
        return DecoderMaps((coarsest, coarse, fine), masks)

    def _refine(self, maps: "DecoderMaps", queries: Tensor, position: Tensor) -> Tensor:
        """Returns the queries after every block in training, or the last block, (L, N, Q, C).

        Takes queries and their position encodings, (N, Q, C) each.
        """
        x = maps.levels[0]
        states: list[Tensor] = []
        for scale, blocks in enumerate(self.levels):
            padding = maps.masks[scale]
            if scale > 0:  # from stride 32 to 16, or from 16 to 8
                upsampled = maps.go_up(x, scale)
                x = self.up[scale - 1](upsampled, padding) + maps.levels[scale]
            level = LevelMap(
                x=x.flatten(2).transpose(1, 2).contiguous(),
                position=self.position_encoding(x.shape[-2:], padding),
                size=x.shape[-2:],
                padding=padding,
            )
            for block in cast(Sequence[DecoderBlock], blocks):
                queries, position, level = block(queries, position, level)
                states.append(queries)
            x = level.as_image(level.x)
        return torch.stack(states if self.training else states[-1:])


@dataclass(frozen=True)
class DecoderMaps:
    """Feature maps (N, C, H, W) at strides 32, 16 and 8, and their padding masks."""

    levels: tuple[Tensor, Tensor, Tensor]
    masks: Sequence[Tensor | None]

    def go_up(self, x: Tensor, scale: int) -> Tensor:
        """Resizes a feature map of level ``scale - 1`` to the size of level ``scale``."""
        size = self.levels[scale].shape[-2:]
        return resize_bilinear(x, size, self.masks[scale - 1], self.masks[scale])

    def merged(self) -> list[Tensor]:
        """Returns a feature map per level, to which the upsampled coarser levels are added."""
        maps = [self.levels[0]]
        for scale in (1, 2):
            maps.append(self.levels[scale] + self.go_up(maps[-1], scale))
        return maps


def _build_block(widths: DecoderWidths, *, is_coarsest: bool, is_last: bool) -> DecoderBlock:
    """Builds a block: M-F+ for the coarsest level, and M-F- for the other levels."""
    query_layer = QueryLayer(widths)
    if is_last:  # no later block reads the feature map
        return DecoderBlock(query_layer=query_layer)
    mobile = TransformerMobile(widths) if is_coarsest else LiteMobile(widths)
    return DecoderBlock(query_layer=query_layer, mobile=mobile, query_to_map=QueryToMap(widths))
