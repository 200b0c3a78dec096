# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Keys of image classifiers: what reads the backbone's features, and how it is regularised."""

from detectron2.config import CfgNode


def add_classifier_keys(cfg: CfgNode) -> None:
    """Adds ``MODEL.CLASSIFIER`` to a config, in place."""
    cfg.MODEL.CLASSIFIER = CfgNode()
    cfg.MODEL.CLASSIFIER.NUM_CLASSES = 1000
    # Map that is classified; the first token is read besides, where the backbone gives "tokens".
    cfg.MODEL.CLASSIFIER.IN_FEATURE = "s16_expanded"
    cfg.MODEL.CLASSIFIER.DECODER = "linear"  # "linear", or "transformer": "tran-k" of the paper
    # BatchNorm without scale and offset before the linear decoder, as linear probing has it.
    cfg.MODEL.CLASSIFIER.NORMALIZE = False
    # Of the transformer decoder; the paper has widths of 192, 384 and 768 for 285M, 1.0G and 3.7G.
    cfg.MODEL.CLASSIFIER.WIDTH = 192  # a multiple of 64
    cfg.MODEL.CLASSIFIER.DEPTH = 1  # blocks: k of "tran-k"
    cfg.MODEL.CLASSIFIER.DROPOUT = 0.0  # rate inside the blocks
    cfg.MODEL.CLASSIFIER.LABEL_SMOOTHING = 0.0
    # Alphas of the beta distributions that shares are drawn from; 0 leaves it out. Where both are
    # given, each batch is mixed in one of the two ways, drawn evenly.
    cfg.MODEL.CLASSIFIER.MIXUP = 0.0
    cfg.MODEL.CLASSIFIER.CUTMIX = 0.0
