# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Config keys of MF-DETR's further queries in training, with their defaults and one comment each.

All are off by default, as in the paper; the network of inference is the same with all of them.
"""

from detectron2.config import CfgNode


def add_detr_help_keys(cfg: CfgNode) -> None:
    """Adds ``MODEL.MF_DETR.DENOISING`` and ``MODEL.MF_DETR.QUERY_GROUPS`` to a config, in place."""
    cfg.MODEL.MF_DETR.DENOISING = CfgNode()
    # Noised copies of every ground-truth box that are queries in training; 0: none.
    cfg.MODEL.MF_DETR.DENOISING.GROUPS = 0
    # How far a corner may move, relative to half the box's side; of negatives once to twice as far.
    cfg.MODEL.MF_DETR.DENOISING.BOX_NOISE = 0.4
    cfg.MODEL.MF_DETR.DENOISING.LABEL_NOISE = 0.25  # probability that a label is drawn anew
    # Beside each copy one with more noise, which is to be recognised as no object.
    cfg.MODEL.MF_DETR.DENOISING.NEGATIVES = True
    # Most denoising queries of an image: one with many boxes has fewer groups, or not all boxes.
    cfg.MODEL.MF_DETR.DENOISING.MAX_QUERIES = 200
    cfg.MODEL.MF_DETR.DENOISING.WEIGHT = 1.0  # of its losses, relative to the main ones

    cfg.MODEL.MF_DETR.QUERY_GROUPS = CfgNode()
    # Sets of object queries, each matched one-to-one on its own; all but the first help training.
    cfg.MODEL.MF_DETR.QUERY_GROUPS.COUNT = 1
    # Of each further group's losses, relative to the main ones.
    cfg.MODEL.MF_DETR.QUERY_GROUPS.WEIGHT = 1.0
