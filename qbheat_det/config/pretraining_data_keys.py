# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Keys of the mapper "pretrain": what is cut out of an image, and whether images stay in memory."""

from detectron2.config import CfgNode


def add_pretraining_data_keys(cfg: CfgNode) -> None:
    """Adds ``INPUT.PRETRAIN`` to a config, in place.

    Of Detectron2's own keys the mapper reads ``INPUT.FORMAT`` and ``INPUT.RANDOM_FLIP``.
    """
    cfg.INPUT.PRETRAIN = CfgNode()
    cfg.INPUT.PRETRAIN.SIZE = 256  # side of the square that the model sees, in pixels
    # RandomResizedCrop: share of the image's area, and width over height, each [min, max].
    cfg.INPUT.PRETRAIN.SCALE = [0.2, 1.0]
    cfg.INPUT.PRETRAIN.RATIO = [3 / 4, 4 / 3]
    # A training set that takes less memory than this when decoded is decoded once, at the start.
    # GB (1e9 bytes) of one machine; 0 reads every image from its file each time, as do fixed views
    # (INPUT.FIXED_VIEWS), which must not depend on what fits into memory.
    cfg.INPUT.PRETRAIN.MEMORY_GB = 4.0
