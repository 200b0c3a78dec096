# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Config keys of the pre-training objectives, with their defaults and one comment each."""

from detectron2.config import CfgNode


def add_pretraining_keys(cfg: CfgNode) -> None:
    """Adds ``MODEL.QB_HEAT`` to a config, in place."""
    cfg.MODEL.QB_HEAT = CfgNode()
    # Backbone output to predict, of any stride s for which a quarter of INPUT.PRETRAIN.SIZE is a
    # multiple of s; a position reconstructs s x s pixels.
    cfg.MODEL.QB_HEAT.IN_FEATURE = "s16_expanded"
    # Where the visible quarter of the image is: "corner", "centre", or "both", half a batch each.
    cfg.MODEL.QB_HEAT.VISIBLE = "both"
    # Explicit linear models of each scale: 8, 4 (A1, A2, B1, B2) or 2 (A1, B1).
    cfg.MODEL.QB_HEAT.NUM_MODELS = 8
    cfg.MODEL.QB_HEAT.FEATURE_DIM = 512  # channels of what is predicted
    cfg.MODEL.QB_HEAT.DECODER_DEPTH = 6  # transformer blocks
    cfg.MODEL.QB_HEAT.DECODER_DIM = 512
    cfg.MODEL.QB_HEAT.DECODER_HEADS = 16
    cfg.MODEL.QB_HEAT.DECODER_MLP_RATIO = 4.0  # hidden width of the feed-forward networks
    cfg.MODEL.QB_HEAT.LOSS_ON = "masked"  # positions that count: "masked" or "all"
    # Bring each true patch to mean 0 and variance 1 before it is compared.
    cfg.MODEL.QB_HEAT.NORM_PIXEL_LOSS = True
