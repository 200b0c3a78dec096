# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Keys of the looks that a run takes at itself: how often, and how much of its time."""

from detectron2.config import CfgNode


def add_looking_keys(cfg: CfgNode) -> None:
    """Adds ``LOOK`` to a config, in place."""
    cfg.LOOK = CfgNode()
    # Pictures and figures in OUTPUT_DIR/looks and in TensorBoard, where the model has any to show.
    # A score that TEST.KNN asks for is made in any case.
    cfg.LOOK.ENABLED = True
    # Iterations; 0 looks twenty times a run. There is a look before the first step and after the
    # last in any case.
    cfg.LOOK.PERIOD = 0
    cfg.LOOK.EPOCHS = 0.0  # where not 0, LOOK.PERIOD is worked out from it
    # Of the run's time that each kind of look may take; those in between are left out beyond it.
    cfg.LOOK.SHARE = 0.01
    # Images that are reconstructed: spread evenly over DATASETS.TEST, or over DATASETS.TRAIN where
    # there is no test set.
    cfg.LOOK.NUM_IMAGES = 8
