# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The backbone of a config by itself, without pyramid, for files that hold nothing else."""

from detectron2.config import CfgNode
from detectron2.modeling import Backbone, build_backbone

from qbheat_det.modeling.contracts import get_encoder


def build_bare_backbone(cfg: CfgNode) -> Backbone:
    """Builds the config's backbone, of a pyramid what stands below it; nothing is frozen."""
    own = cfg.clone()
    own.defrost()
    own.MODEL.BACKBONE.FREEZE_AT = 0
    backbone: Backbone = build_backbone(own)
    return get_encoder(backbone)
