# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Ground floor: tensors in, tensors out."""

from .attention import MapAttention, attend
from .attention_readout import AttentionRecord, AttentionWeights, read_attention
from .convolutions import DepthwiseConv2d, NormedConv2d
from .cross_attention import FormerToMobile, MobileToFormer
from .dropout import Dropout
from .dynamic_relu import DynamicReLU
from .fast_linear import Linear, linear, replace_linear_layers
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
    "padding_mask",
    "pointwise",
    "read_attention",
    "replace_linear_layers",
    "resize_bilinear",
    "valid_sizes",
    "zero_padding",
]
