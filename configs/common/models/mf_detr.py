# Copyright (c) qbheat_det contributors. Apache-2.0.
"""MF-DETR with MF-Dec-522 on Mobile-Former; twin of coco/Base-MFDETR.yaml."""

from detectron2.config import LazyCall as L

from qbheat_det.modeling.backbone import shapes_of
from qbheat_det.modeling.detr import MFDETR, MFDecoder, SetCriterion
from qbheat_det.modeling.detr.criterion import SoftmaxClassification
from qbheat_det.modeling.detr.decoder_block import DecoderWidths

from ..data.constants import constants
from .mobile_former import model as backbone

model = L(MFDETR)(
    backbone=backbone,
    decoder=L(MFDecoder)(
        input_shape=L(shapes_of)(arch="${...backbone.arch}", names="${...in_features}"),
        num_classes=80,
        num_queries=100,
        num_blocks=[5, 2, 2],  # at strides 32, 16, 8; MF-Dec-211 is [2, 1, 1]
        widths=L(DecoderWidths)(dim=256, num_heads=8, hidden=1024, expansion=6, dropout=0.1),
        norm="BN",
    ),
    criterion=L(SetCriterion)(
        num_classes="${..decoder.num_classes}",
        classification=L(SoftmaxClassification)(no_object_weight=0.1),
        class_weight=1.0,
        l1_weight=5.0,
        giou_weight=2.0,
    ),
    in_features="${.backbone.out_features}",
    pixel_mean=constants.pixel_mean,
    pixel_std=constants.pixel_std,
)
