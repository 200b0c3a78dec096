# Copyright (c) qbheat_det contributors. Apache-2.0.
"""timm models, one of each kind, in detectors small enough for a test."""

from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.structures import Boxes, Instances

from qbheat_det.config import get_cfg

NAMES = ("resnet18", "efficientnet_b0", "mobilenetv4_conv_small", "convnext_atto")


def make_retinanet_config(name: str) -> CfgNode:
    cfg = get_cfg()
    cfg.MODEL.META_ARCHITECTURE = "SyncRetinaNet"
    cfg.MODEL.BACKBONE.NAME = "build_fpn_backbone"
    cfg.MODEL.FPN.BOTTOM_UP = f"timm:{name}"
    cfg.MODEL.FPN.IN_FEATURES = ["s8", "s16", "s32"]
    cfg.MODEL.FPN.TOP_LEVELS = 2
    cfg.MODEL.FPN.OUT_CHANNELS = 16
    cfg.MODEL.RETINANET.NUM_CLASSES = 3
    cfg.MODEL.RETINANET.NUM_CONVS = 1
    return _on_cpu(cfg)


def make_mf_detr_config(name: str) -> CfgNode:
    cfg = get_cfg()
    cfg.MODEL.META_ARCHITECTURE = "MFDETR"
    cfg.MODEL.BACKBONE.NAME = f"timm:{name}"
    node = cfg.MODEL.MF_DETR
    node.IN_FEATURES = ["s8", "s16"]
    node.NUM_CLASSES = 3
    node.NUM_BLOCKS = [1, 1, 1]
    node.HIDDEN_DIM = 16
    node.NHEADS = 2
    node.DIM_FEEDFORWARD = 32
    node.NUM_OBJECT_QUERIES = 8
    return _on_cpu(cfg)


def make_batch() -> list[dict[str, Any]]:
    """Two images of different sizes, with an object each."""
    batch = []
    for height, width in ((64, 96), (72, 64)):
        instances = Instances((height, width))
        instances.gt_boxes = Boxes(torch.tensor([[4.0, 8.0, 40.0, 56.0]]))
        instances.gt_classes = torch.tensor([1])
        image = torch.randint(0, 256, (3, height, width), dtype=torch.uint8)
        batch.append({"image": image, "instances": instances})
    return batch


def _on_cpu(cfg: CfgNode) -> CfgNode:
    cfg.MODEL.DEVICE = "cpu"
    cfg.MODEL.BACKBONE.FREEZE_AT = 0
    return cfg
