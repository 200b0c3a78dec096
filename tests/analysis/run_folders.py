# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Folders of finished runs of tiny models: weights, config and log, as training leaves them."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from detectron2.config import CfgNode
from detectron2.modeling import build_model

from qbheat_det.checkpoint import WeightsInfo, save_weights
from tests.modeling.tiny_pretraining import make_tiny_config

CLASSES = ["cat", "dog", "bird"]


def classifier_config() -> CfgNode:
    """Returns one for images of 80 pixels."""
    cfg = make_tiny_config("ImageClassifier")
    cfg.MODEL.MOBILE_FORMER.OUT_FEATURES = ["s16_expanded", "tokens"]
    cfg.MODEL.CLASS_NAMES = CLASSES
    cfg.MODEL.CLASSIFIER.NUM_CLASSES = 3
    cfg.MODEL.CLASSIFIER.DECODER = "linear"
    cfg.MODEL.CLASSIFIER.IN_FEATURE = "s16_expanded"
    cfg.INPUT.DATASET_MAPPER_NAME = "classify"
    cfg.INPUT.PRETRAIN.SIZE = 80
    cfg.MODEL.DEVICE = "cpu"
    return cfg


def detector_config() -> CfgNode:
    """Returns a RetinaNet of three classes."""
    cfg = make_tiny_config("SyncRetinaNet")
    cfg.MODEL.BACKBONE.NAME = "build_mobile_former_fpn_backbone"
    cfg.MODEL.MOBILE_FORMER.OUT_FEATURES = ["s8", "s16"]
    cfg.MODEL.FPN.IN_FEATURES = ["s8", "s16"]
    cfg.MODEL.FPN.OUT_CHANNELS = 16
    cfg.MODEL.RETINANET.IN_FEATURES = ["p3", "p4", "p5", "p6", "p7"]
    cfg.MODEL.RETINANET.NUM_CLASSES = 3
    cfg.MODEL.DEVICE = "cpu"
    return cfg


def write_run(folder: Path, cfg: CfgNode, *, logged: Mapping[str, float] | None = None) -> Path:
    """Writes a run with random weights that ended after ten steps with these metrics."""
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    info = WeightsInfo.from_config(cfg, iteration=9, commit="")
    save_weights(str(folder / "model_final.safetensors"), build_model(cfg).state_dict(), info)
    (folder / "config.yaml").write_text(cfg.dump(), encoding="utf-8")
    records = [{"iteration": 4, "total_loss": 2.0}, {"iteration": 9, **(logged or {})}]
    lines = "".join(f"{json.dumps(record)}\n" for record in records)
    (folder / "metrics.json").write_text(lines, encoding="utf-8")
    return folder
