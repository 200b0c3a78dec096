# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Detectron2's FCOS on Mobile-Former; twin of coco/Base-FCOS.yaml."""

from detectron2.config import LazyCall as L
from detectron2.layers import ShapeSpec

from qbheat_det.modeling.dense import SyncFCOS, build_fcos_head

from ..data.constants import constants
from .mobile_former_fpn import model as backbone

model = L(SyncFCOS)(
    backbone=backbone,
    head=L(build_fcos_head)(
        input_shape=[L(ShapeSpec)(channels="${....backbone.out_channels}")] * 5,
        num_classes="${..num_classes}",
        conv_dims=[256, 256, 256, 256],
        norm="GN",
        prior_prob=0.01,
    ),
    head_in_features=["p3", "p4", "p5", "p6", "p7"],
    num_classes=80,
    center_sampling_radius=1.5,
    focal_loss_alpha=0.25,
    focal_loss_gamma=2.0,
    test_score_thresh=0.2,
    test_topk_candidates=1000,
    test_nms_thresh=0.6,
    max_detections_per_image=100,
    pixel_mean=constants.pixel_mean,
    pixel_std=constants.pixel_std,
)
