# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Ground floor: tensors in, tensors out."""

from .attention import MapAttention, attend
from .attention_readout import AttentionRecord, AttentionWeights, read_attention
from .convolutions import DepthwiseConv2d, NormedConv2d
from .cross_attention import FormerToMobile, MobileToFormer
from .dropout import Dropout
from .dynamic_relu import DynamicReLU
from .former import Former
from .mobile_former_block import (
    DownMobile,
    LiteBottleneck,
    Mobile,
    MobileFormerBlock,
    depthwise,
    pointwise,
)
from .padding import halve, padding_mask, resize_bilinear, valid_sizes, zero_padding
from .pooled_features import PooledFeatures
from .position_encoding import SinePositionEncoding
from .products import Linear, linear, multiply_by_rows

__all__ = [
    "AttentionRecord",
    "AttentionWeights",
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
    "multiply_by_rows",
    "padding_mask",
    "pointwise",
    "read_attention",
    "resize_bilinear",
    "valid_sizes",
    "zero_padding",
]
