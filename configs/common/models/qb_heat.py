# Copyright (c) qbheat_det contributors. Apache-2.0.
"""QB-Heat on Mobile-Former; twin of ImageNet-QBHeat/Base-QBHeat.yaml."""

from detectron2.config import LazyCall as L

from qbheat_det.modeling.pretrain import (
    HeatPredictor,
    QBHeat,
    ReconstructionDecoder,
    ReconstructionLoss,
)

from ..data.constants import constants
from .mobile_former import model as backbone

backbone.out_features = ["s16_expanded"]
model = L(QBHeat)(
    backbone=backbone,
    predictor=L(HeatPredictor)(dim=512, num_models=8, visible="both"),
    decoder=L(ReconstructionDecoder)(
        in_channels="${..predictor.dim}",
        grid_size=16,  # of patches of the map's stride: images of 256 pixels
        patch_size=16,
        dim=512,
        depth=6,
        num_heads=16,
        mlp_ratio=4.0,
    ),
    loss=L(ReconstructionLoss)(positions="masked", normalize_patches=True),
    in_feature="s16_expanded",
    pixel_mean=constants.pixel_mean,
    pixel_std=constants.pixel_std,
)
