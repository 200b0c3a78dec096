# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Keys of MoCo-v2 and of its two views, with their defaults and one comment each."""

from detectron2.config import CfgNode


def add_moco_keys(cfg: CfgNode) -> None:
    """Adds ``MODEL.MOCO`` and ``INPUT.TWO_VIEWS`` to a config, in place.

    What is cut out of an image, and how large, is ``INPUT.PRETRAIN``'s, as in all pre-training.
    """
    cfg.MODEL.MOCO = CfgNode()
    cfg.MODEL.MOCO.IN_FEATURE = "s16_expanded"  # backbone output whose mean is compared
    cfg.MODEL.MOCO.HIDDEN_DIM = 2048  # of the head, a perceptron of two layers
    cfg.MODEL.MOCO.DIM = 128  # of what is compared
    cfg.MODEL.MOCO.TEMPERATURE = 0.2
    cfg.MODEL.MOCO.MOMENTUM = 0.999  # what the encoder of keys keeps of itself in each step
    # Keys of earlier steps; a multiple of SOLVER.IMS_PER_BATCH. At most a quarter of the training
    # images: the queue else holds keys of the query's own image for more than 3 % of the queries.
    cfg.MODEL.MOCO.QUEUE_SIZE = 65536
    # Parts of each process's images, or of a micro-batch of them, with BatchNorm statistics of
    # their own. With one process, 1 lets queries and keys share their statistics.
    cfg.MODEL.MOCO.NORM_GROUPS = 1

    cfg.INPUT.TWO_VIEWS = CfgNode()
    # Brightness, contrast, saturation (factors in 1 +- x), hue (of the circle), in any order.
    cfg.INPUT.TWO_VIEWS.JITTER = [0.4, 0.4, 0.4, 0.1]
    cfg.INPUT.TWO_VIEWS.JITTER_PROBABILITY = 0.8
    cfg.INPUT.TWO_VIEWS.GREY_PROBABILITY = 0.2
    cfg.INPUT.TWO_VIEWS.BLUR_SIGMA = [0.1, 2.0]  # of a Gaussian, in pixels, [min, max]
    cfg.INPUT.TWO_VIEWS.BLUR_PROBABILITY = 0.5
