# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Config keys of Detectron2's FCOS, which has none there, after those of ``MODEL.RETINANET``."""

from detectron2.config import CfgNode


def add_fcos_keys(cfg: CfgNode) -> None:
    """Adds ``MODEL.FCOS`` to a config, in place; defaults are Detectron2's LazyConfig of FCOS."""
    cfg.MODEL.FCOS = CfgNode()
    cfg.MODEL.FCOS.NUM_CLASSES = 80
    cfg.MODEL.FCOS.IN_FEATURES = ["p3", "p4", "p5", "p6", "p7"]
    cfg.MODEL.FCOS.NUM_CONVS = 4  # of each of the head's two towers
    cfg.MODEL.FCOS.NORM = "GN"  # of the towers; "GN" has 32 groups
    cfg.MODEL.FCOS.PRIOR_PROB = 0.01  # probability of each class at first
    # Half the side of the square around a box's centre whose places learn it, in strides.
    cfg.MODEL.FCOS.CENTER_SAMPLING_RADIUS = 1.5
    cfg.MODEL.FCOS.FOCAL_LOSS_ALPHA = 0.25
    cfg.MODEL.FCOS.FOCAL_LOSS_GAMMA = 2.0
    cfg.MODEL.FCOS.SCORE_THRESH_TEST = 0.2  # of the root of class score times centerness
    cfg.MODEL.FCOS.TOPK_CANDIDATES_TEST = 1000
    cfg.MODEL.FCOS.NMS_THRESH_TEST = 0.6
