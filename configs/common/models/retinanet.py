# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Detectron2's RetinaNet on Mobile-Former; twin of coco/Base-RetinaNet.yaml."""

from detectron2.config import LazyCall as L
from detectron2.layers import ShapeSpec
from detectron2.modeling.anchor_generator import DefaultAnchorGenerator
from detectron2.modeling.box_regression import Box2BoxTransform
from detectron2.modeling.matcher import Matcher
from detectron2.modeling.meta_arch.retinanet import RetinaNetHead

from qbheat_det.modeling.retinanet import SyncRetinaNet

from ..data.constants import constants
from .mobile_former_fpn import model as backbone

model = L(SyncRetinaNet)(
    backbone=backbone,
    head=L(RetinaNetHead)(
        input_shape=[L(ShapeSpec)(channels="${....backbone.out_channels}")] * 5,
        num_classes="${..num_classes}",
        num_anchors=9,
        conv_dims=[256, 256, 256, 256],
        norm="",
        prior_prob=0.01,
    ),
    head_in_features=["p3", "p4", "p5", "p6", "p7"],
    anchor_generator=L(DefaultAnchorGenerator)(
        # Octave base 4, three scales an octave, three ratios, as in arXiv:1708.02002.
        sizes=[
            [32, 40.32, 50.8],
            [64, 80.63, 101.59],
            [128, 161.27, 203.19],
            [256, 322.54, 406.37],
            [512, 645.08, 812.75],
        ],
        aspect_ratios=[0.5, 1.0, 2.0],
        strides=[8, 16, 32, 64, 128],
        offset=0.0,
    ),
    box2box_transform=L(Box2BoxTransform)(weights=[1.0, 1.0, 1.0, 1.0]),
    anchor_matcher=L(Matcher)(
        thresholds=[0.4, 0.5], labels=[0, -1, 1], allow_low_quality_matches=True
    ),
    num_classes=80,
    focal_loss_alpha=0.25,
    focal_loss_gamma=2.0,
    smooth_l1_beta=0.0,
    test_score_thresh=0.05,
    test_topk_candidates=1000,
    test_nms_thresh=0.5,
    max_detections_per_image=100,
    pixel_mean=constants.pixel_mean,
    pixel_std=constants.pixel_std,
    input_format=constants.pixel_format,
)
