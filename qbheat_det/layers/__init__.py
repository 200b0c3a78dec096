# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Layers: tensors in, tensors out."""

from .attention import MapAttention, attend
from .attention_readout import read_attention
from .convolutions import DepthwiseConv2d, DynamicReLU, NormedConv2d
from .cpu_kernels import Dropout, Linear, linear, replace_linear_layers
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
from .padded_maps import (
    SinePositionEncoding,
    halve,
    padding_mask,
    resize_bilinear,
    valid_sizes,
    zero_padding,
)
from .pooled_features import PooledFeatures

__all__ = [
    "DepthwiseConv2d",
    "DownMobile",
    "Dropout",
    "DynamicReLU",
    "Former",
    "FormerToMobile",
    "Linear",
    "LiteBottleneck",
    "MapAttention",
    "Mobile",
    "MobileFormerBlock",
    "MobileToFormer",
    "NormedConv2d",
    "PooledFeatures",
    "SinePositionEncoding",
    "attend",
    "depthwise",
    "halve",
    "linear",
    "padding_mask",
    "pointwise",
    "read_attention",
    "replace_linear_layers",
    "resize_bilinear",
    "valid_sizes",
    "zero_padding",
]
