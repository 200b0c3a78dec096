# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Detectron2's Faster R-CNN on Mobile-Former; twin of coco/Base-RCNN-FPN.yaml."""

from detectron2.config import LazyCall as L
from detectron2.layers import ShapeSpec
from detectron2.modeling.anchor_generator import DefaultAnchorGenerator
from detectron2.modeling.box_regression import Box2BoxTransform
from detectron2.modeling.matcher import Matcher
from detectron2.modeling.meta_arch import GeneralizedRCNN
from detectron2.modeling.poolers import ROIPooler
from detectron2.modeling.proposal_generator import RPN, StandardRPNHead
from detectron2.modeling.roi_heads import (
    FastRCNNConvFCHead,
    FastRCNNOutputLayers,
    StandardROIHeads,
)

from ..data.constants import constants
from .mobile_former_fpn import model as backbone

backbone.bottom_up.out_features = ["s4", "s8", "s16"]
backbone.top_block.num_levels = 2

model = L(GeneralizedRCNN)(
    backbone=backbone,
    proposal_generator=L(RPN)(
        in_features=["p2", "p3", "p4", "p5", "p6"],
        head=L(StandardRPNHead)(in_channels="${...backbone.out_channels}", num_anchors=3),
        anchor_generator=L(DefaultAnchorGenerator)(
            sizes=[[32], [64], [128], [256], [512]],
            aspect_ratios=[0.5, 1.0, 2.0],
            strides=[4, 8, 16, 32, 64],
            offset=0.0,
        ),
        anchor_matcher=L(Matcher)(
            thresholds=[0.3, 0.7], labels=[0, -1, 1], allow_low_quality_matches=True
        ),
        box2box_transform=L(Box2BoxTransform)(weights=[1.0, 1.0, 1.0, 1.0]),
        batch_size_per_image=256,
        positive_fraction=0.5,
        pre_nms_topk=[2000, 1000],
        post_nms_topk=[1000, 1000],
        nms_thresh=0.7,
    ),
    roi_heads=L(StandardROIHeads)(
        num_classes=80,
        batch_size_per_image=512,
        positive_fraction=0.25,
        proposal_matcher=L(Matcher)(
            thresholds=[0.5], labels=[0, 1], allow_low_quality_matches=False
        ),
        box_in_features=["p2", "p3", "p4", "p5"],
        box_pooler=L(ROIPooler)(
            output_size=7,
            scales=[1 / 4, 1 / 8, 1 / 16, 1 / 32],
            sampling_ratio=0,
            pooler_type="ROIAlignV2",
        ),
        box_head=L(FastRCNNConvFCHead)(
            input_shape=L(ShapeSpec)(channels="${....backbone.out_channels}", height=7, width=7),
            conv_dims=[],
            fc_dims=[1024, 1024],
        ),
        box_predictor=L(FastRCNNOutputLayers)(
            input_shape=L(ShapeSpec)(channels=1024),
            box2box_transform=L(Box2BoxTransform)(weights=[10.0, 10.0, 5.0, 5.0]),
            num_classes="${..num_classes}",
            test_score_thresh=0.05,
        ),
    ),
    pixel_mean=constants.pixel_mean,
    pixel_std=constants.pixel_std,
    input_format=constants.pixel_format,
)
