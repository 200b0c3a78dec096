# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Backbones. Importing this package registers them with Detectron2."""

from .fpn import build_mobile_former_fpn_backbone
from .mobile_former import MobileFormer
from .mobile_former_archs import MOBILE_FORMER_ARCHS, MobileFormerArch
from .mobile_former_fpn import MobileFormerFPN
from .timm_backbone import TimmBackbone, register_timm_backbone
from .timm_mobile_former import TimmMobileFormer

__all__ = [
    "MOBILE_FORMER_ARCHS",
    "MobileFormer",
    "MobileFormerArch",
    "MobileFormerFPN",
    "TimmBackbone",
    "TimmMobileFormer",
    "build_mobile_former_fpn_backbone",
    "register_timm_backbone",
]
