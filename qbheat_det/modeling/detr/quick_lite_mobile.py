# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The lite bottleneck of MF-DETR with fewer passes over its wide map, in inference."""

import torch
from torch import Tensor

from qbheat_det.layers.quick_blocks import QUICK_BLOCKS, bend, by_turn, convolve, fits, part

from .decoder_block import LevelMap, LiteMobile


class QuickLiteMobile(LiteMobile):
    """As ``LiteMobile``; see ``layers/quick_blocks.py``."""

    def forward(self, level: LevelMap, queries: Tensor) -> Tensor:
        """As ``LiteMobile.forward``."""
        convolution = self.depthwise
        has_norm = convolution.norm is not None
        if level.padding is not None or not fits(level.x, convolution) or has_norm:
            return super().forward(level, queries)
        image = level.as_image(level.x)
        order = by_turn(convolution)
        parts = [part(convolution, image, rows) for rows in order.split(image.shape[1])]
        hidden, factor = bend(self.act, torch.cat(parts, dim=1), queries[:, 0], order)
        out = convolve(self.pointwise, hidden, factor, order)
        return out.flatten(2).transpose(1, 2) + level.x


QUICK_BLOCKS[LiteMobile] = QuickLiteMobile
