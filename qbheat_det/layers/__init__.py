# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Layers that take and return tensors, without knowledge of models, configs or data."""

from .attention import MapAttention, attend, read_attention
from .cpu_kernels import Dropout, DynamicReLU, Linear, NormedConv2d, linear, replace_linear_layers
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
    "DownMobile", "Dropout", "DynamicReLU", "Former", "FormerToMobile", "Linear",
    "LiteBottleneck", "MapAttention", "Mobile", "MobileFormerBlock", "MobileToFormer",
    "NormedConv2d", "SinePositionEncoding", "attend", "depthwise", "halve", "linear",
    "padding_mask", "pointwise", "read_attention", "replace_linear_layers", "resize_bilinear",
    "zero_padding",
]  # fmt: skip
