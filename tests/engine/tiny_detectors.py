# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Two detectors for tests of prediction: one that measures its input, and a small RetinaNet."""

import torch
from detectron2.modeling import META_ARCH_REGISTRY, build_model
from detectron2.structures import Boxes, Instances
from torch import nn

from qbheat_det.config import load_config


@META_ARCH_REGISTRY.register()
class ChannelProbe(nn.Module):
    """Finds the left half of every image, with the mean of input channel 0 as the score."""

    def __init__(self, cfg):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, inputs):
        outputs = []
        for record in inputs:
            found = Instances((record["height"], record["width"]))
            found.pred_boxes = Boxes(torch.tensor([[0, 0, record["width"] / 2, record["height"]]]))
            found.scores = record["image"][:1].float().mean()[None] / 255 * self.scale
            found.pred_classes = torch.tensor([1])
            outputs.append({"instances": found})
        return outputs


def make_probe_config():
    words = """
MODEL.META_ARCHITECTURE ChannelProbe MODEL.DEVICE cpu MODEL.CLASS_NAMES ["square","disc"]
MODEL.CATEGORY_IDS [4,9] INPUT.FORMAT RGB INPUT.MIN_SIZE_TEST 32 INPUT.MAX_SIZE_TEST 64"""
    return load_config(None, words.split())


def make_retinanet_config():
    """Returns that of a RetinaNet whose random weights give boxes at once."""
    words = """
MODEL.META_ARCHITECTURE RetinaNet MODEL.DEVICE cpu INPUT.FORMAT RGB INPUT.MIN_SIZE_TEST 64
INPUT.MAX_SIZE_TEST 96 MODEL.BACKBONE.NAME build_retinanet_resnet_fpn_backbone
MODEL.RESNETS.OUT_FEATURES ["res3","res4","res5"] MODEL.RESNETS.RES2_OUT_CHANNELS 16
MODEL.RESNETS.STEM_OUT_CHANNELS 8 MODEL.RESNETS.WIDTH_PER_GROUP 4
MODEL.FPN.IN_FEATURES ["res3","res4","res5"] MODEL.FPN.OUT_CHANNELS 8
MODEL.ANCHOR_GENERATOR.SIZES [[16],[32],[64],[128],[256]] MODEL.RETINANET.NUM_CLASSES 3
MODEL.RETINANET.NUM_CONVS 1 MODEL.RETINANET.PRIOR_PROB 0.5 TEST.DETECTIONS_PER_IMAGE 20"""
    return load_config(None, words.split())


def save_run(cfg, folder, *, seed=0):
    """Writes what training leaves behind; returns the path of the weights."""
    torch.manual_seed(seed)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(cfg.dump())
    weights = folder / "model_final.pth"
    torch.save({"model": build_model(cfg).state_dict(), "iteration": 1}, weights)
    return str(weights)
