# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Detectron2's Mask R-CNN on Mobile-Former: Faster R-CNN with a branch for masks."""

from detectron2.config import LazyCall as L
from detectron2.layers import ShapeSpec
from detectron2.modeling.poolers import ROIPooler
from detectron2.modeling.roi_heads import MaskRCNNConvUpsampleHead

from .faster_rcnn import model

model.roi_heads.update(
    mask_in_features=["p2", "p3", "p4", "p5"],
    mask_pooler=L(ROIPooler)(
        output_size=14,
        scales=[1 / 4, 1 / 8, 1 / 16, 1 / 32],
        sampling_ratio=0,
        pooler_type="ROIAlignV2",
    ),
    mask_head=L(MaskRCNNConvUpsampleHead)(
        input_shape=L(ShapeSpec)(channels="${....backbone.out_channels}", height=14, width=14),
        num_classes="${..num_classes}",
        conv_dims=[256, 256, 256, 256, 256],
    ),
)
