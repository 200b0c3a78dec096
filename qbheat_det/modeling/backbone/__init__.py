# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Backbones; importing this package registers them."""

from .fpn import build_mobile_former_fpn_backbone
from .mobile_former import MOBILE_FORMER_ARCHS, BlockSpec, MobileFormer, MobileFormerArch

__all__ = [
    "MOBILE_FORMER_ARCHS",
    "BlockSpec",
    "MobileFormer",
    "MobileFormerArch",
    "build_mobile_former_fpn_backbone",
]
