# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Small dense detectors and their inputs, for tests."""

from tests.engine.gradient_cases import NUM_BOXES, make_image
from tests.modeling.tiny_pretraining import make_tiny_config


def make_dense_config(name):
    cfg = make_tiny_config(name)
    for node in (cfg.MODEL.FCOS, cfg.MODEL.RETINANET):
        # Of a map of one place, 32 groups of 32 channels have no statistics.
        node.update({"NUM_CLASSES": 3, "NUM_CONVS": 1, "NORM": ""})
    cfg.MODEL.FPN.update({"IN_FEATURES": ["s8", "s16"], "OUT_CHANNELS": 32})
    cfg.MODEL.BACKBONE.NAME = "build_fpn_backbone"
    return cfg


def make_images(*num_boxes):
    """Returns an image with each of these numbers of boxes."""
    return [make_image(NUM_BOXES.index(count)) for count in num_boxes]
