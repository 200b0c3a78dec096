# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Keys of pre-training by the Wasserstein dependency between two areas of an image."""

from detectron2.config import CfgNode


def add_wasserstein_keys(cfg: CfgNode) -> None:
    """Adds ``MODEL.WASSERSTEIN`` to a config, in place."""
    cfg.MODEL.WASSERSTEIN = CfgNode()
    # Backbone output that is pooled. Half of INPUT.PRETRAIN.SIZE is a multiple of its stride.
    cfg.MODEL.WASSERSTEIN.IN_FEATURE = "s16_expanded"
    # "dual": the distance itself. "contrastive": telling an area's own partner from the others.
    cfg.MODEL.WASSERSTEIN.FORM = "contrastive"
    cfg.MODEL.WASSERSTEIN.HIDDEN_DIM = 2048  # of the head between encoder and critic
    cfg.MODEL.WASSERSTEIN.DIM = 128  # of what the head gives, between which distances are measured
    # Length of the same, R. In the contrastive form, a bilinear critic with a slope of 1 at pairs
    # gives R / sqrt(2) times their cosine: 10 is like a temperature of 0.14. In the dual form the
    # estimate is a multiple of R.
    cfg.MODEL.WASSERSTEIN.RADIUS = 10.0
    cfg.MODEL.WASSERSTEIN.CRITIC_DIM = 256  # width of the critic's two hidden layers
    # On the squared excess of the critic's slope over 1.
    cfg.MODEL.WASSERSTEIN.PENALTY_WEIGHT = 10.0
