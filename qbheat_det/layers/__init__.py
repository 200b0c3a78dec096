# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Layers that take and return tensors, without knowledge of models, configs or data.

They compute what the papers write. The package ``fast`` has faster forms of some of them.
"""

from .attention import DotProductAttention, MapAttention, read_attention
from .dynamic_relu import DynamicReLU
from .mobile_former_block import (
    DownMobile,
    Former,
    FormerToMobile,
    LiteBottleneck,
    Mobile,
    MobileFormerBlock,
    MobileToFormer,
    depthwise,
    pointwise,
)
from .padded_maps import SinePositionEncoding, halve, padding_mask, resize_bilinear, zero_padding

__all__ = [
    "DotProductAttention",
    "DownMobile",
    "DynamicReLU",
    "Former",
    "FormerToMobile",
    "LiteBottleneck",
    "MapAttention",
    "Mobile",
    "MobileFormerBlock",
    "MobileToFormer",
    "SinePositionEncoding",
    "depthwise",
    "halve",
    "padding_mask",
    "pointwise",
    "read_attention",
    "resize_bilinear",
    "zero_padding",
]
