# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Tiny encoders of every kind in files of weights, and pictures for them."""

from pathlib import Path
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.modeling import build_model

from qbheat_det.checkpoint import WeightsInfo, save_weights
from qbheat_det.engine.seeing.subject import Subject
from tests.data.pictures import draw, save
from tests.modeling.tiny_pretraining import make_tiny_config

CLASSES = ["cat", "dog", "bird"]


def make_pictures(folder: Path, number: int = 3) -> Path:
    """Draws pictures of several sizes; returns their folder."""
    for index in range(number):
        save(folder / f"{index}.png", draw(80 + 8 * index, 96, seed=index))
    return folder


def pretraining_config(meta_arch: str = "QBHeat") -> CfgNode:
    """Returns one of 64 pixels, 4 x 4 positions."""
    cfg = make_tiny_config(meta_arch)
    cfg.INPUT.DATASET_MAPPER_NAME = "pretrain"
    return cfg


def classifier_config(decoder: str = "linear", **classifier: Any) -> CfgNode:
    """Returns one of the same encoder, with its tokens, at 80 pixels: 5 x 5 positions."""
    cfg = make_tiny_config("ImageClassifier")
    cfg.MODEL.MOBILE_FORMER.OUT_FEATURES = ["s16_expanded", "tokens"]
    cfg.MODEL.CLASS_NAMES = CLASSES
    keys = {"NUM_CLASSES": 3, "DECODER": decoder, "WIDTH": 64, "IN_FEATURE": "s16_expanded"}
    for key, value in {**keys, **classifier}.items():
        cfg.MODEL.CLASSIFIER[key] = value
    cfg.INPUT.DATASET_MAPPER_NAME = "classify"
    cfg.INPUT.PRETRAIN.SIZE = 80
    return cfg


def detector_config() -> CfgNode:
    """Returns a RetinaNet on the same encoder."""
    cfg = make_tiny_config("SyncRetinaNet")
    cfg.MODEL.BACKBONE.NAME = "build_mobile_former_fpn_backbone"
    cfg.MODEL.MOBILE_FORMER.OUT_FEATURES = ["s8", "s16"]
    cfg.MODEL.FPN.IN_FEATURES = ["s8", "s16"]
    cfg.MODEL.FPN.OUT_CHANNELS = 16
    cfg.MODEL.RETINANET.IN_FEATURES = ["p3", "p4", "p5", "p6", "p7"]
    cfg.MODEL.RETINANET.NUM_CLASSES = 3
    return cfg


def cut_short(subject: Subject, folder: Path) -> Subject:
    """Returns a run "cut" with the subject's config, whose weights end in the middle."""
    run = folder / "cut"
    run.mkdir()
    (run / "config.yaml").write_text(subject.cfg.dump(), encoding="utf-8")
    if subject.folder is not None and (subject.folder / "run.json").exists():  # of its data
        (run / "run.json").write_bytes((subject.folder / "run.json").read_bytes())
    content = subject.weights.read_bytes()
    (run / "model_final.safetensors").write_bytes(content[: len(content) // 2])
    return Subject.open(run, device="cpu")


def make_subject(
    folder: Path, cfg: CfgNode, label: str, *, iteration: int = 9, seed: int = 0
) -> Subject:
    """Returns random weights as those of a run after so many steps."""
    torch.manual_seed(seed)
    model = build_model(cfg)
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm1d | torch.nn.BatchNorm2d):
            torch.nn.init.uniform_(module.running_mean, -0.1, 0.1)
            torch.nn.init.uniform_(module.running_var, 0.5, 2.0)
    info = WeightsInfo.from_config(cfg, iteration=iteration, commit="")
    path = folder / f"{label}.safetensors"
    save_weights(str(path), model.state_dict(), info)
    return Subject.open(path, label=label, device="cpu")
