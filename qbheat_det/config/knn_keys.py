# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Keys of the nearest-neighbour score, which tells what a backbone separates without training."""

from detectron2.config import CfgNode


def add_knn_keys(cfg: CfgNode) -> None:
    """Adds ``TEST.KNN`` to a config, in place."""
    cfg.TEST.KNN = CfgNode()
    # Names of labelled image sets, such as "imagenet_train": whose images vote, and whose are
    # classified. Empty: no score.
    cfg.TEST.KNN.TRAIN = ()
    cfg.TEST.KNN.VAL = ()
    cfg.TEST.KNN.K = 20  # neighbours that vote
    cfg.TEST.KNN.TEMPERATURE = 0.07  # a vote weighs exp(cosine similarity / temperature)
