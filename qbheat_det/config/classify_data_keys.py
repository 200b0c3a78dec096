# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Keys of the mapper "classify": how images of classes are augmented, and cropped in inference."""

from detectron2.config import CfgNode


def add_classify_data_keys(cfg: CfgNode) -> None:
    """Adds ``INPUT.CLASSIFY`` to a config, in place.

    Size, random part, flip and memory are those of ``INPUT.PRETRAIN``, ``INPUT.RANDOM_FLIP`` and
    ``INPUT.FORMAT``, so that a backbone is pre-trained and probed on images cut alike.
    """
    cfg.INPUT.CLASSIFY = CfgNode()
    # RandAugment as [magnitude, standard deviation of the magnitude], such as [9, 0.5]: a whole
    # number from 0 to 10, and from 0. Empty: none.
    cfg.INPUT.CLASSIFY.RAND_AUGMENT = []
    cfg.INPUT.CLASSIFY.RANDOM_ERASING = 0.0  # probability that a rectangle becomes noise
    # In inference, the side of the square that is cut out of the middle, as a share of the
    # image's shorter side.
    cfg.INPUT.CLASSIFY.TEST_CROP = 0.875
