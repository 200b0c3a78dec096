# Copyright (c) qbheat_det contributors. Apache-2.0.
"""A feature pyramid on Mobile-Former, P3 to P7, as build_fpn_backbone makes it."""

from detectron2.config import LazyCall as L

from qbheat_det.modeling.backbone.fpn import StridedLevels, pyramid_on

from .mobile_former import model as bottom_up

bottom_up.out_features = ["s8", "s16"]
model = L(pyramid_on)(
    bottom_up=bottom_up,
    in_features="${.bottom_up.out_features}",
    out_channels=256,
    norm="",
    top_block=L(StridedLevels)(channels="${..out_channels}", in_feature="p4", num_levels=3),
    fuse_type="sum",
)
