# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Tiny models of every kind in checkpoints, and images for them."""

import functools
from pathlib import Path
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.modeling import build_model
from torch import nn

from qbheat_det.analysis.run import Run
from qbheat_det.checkpoint import WeightsInfo, read_weights, save_weights
from tests.data.pictures import draw, save
from tests.modeling.tiny_pretraining import make_tiny_config

CLASSES = ["cat", "dog", "bird"]
EARLIER = (10, 20, 30)
"""Steps of the checkpoints of "qb_heat" before its last, after 40."""


def make_images(folder: Path, number: int = 3) -> Path:
    """Draws images of several sizes; returns their folder."""
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


def retinanet_config() -> CfgNode:
    """Returns a RetinaNet on the same encoder."""
    cfg = make_tiny_config("SyncRetinaNet")
    cfg.MODEL.BACKBONE.NAME = "build_mobile_former_fpn_backbone"
    cfg.MODEL.MOBILE_FORMER.OUT_FEATURES = ["s8", "s16"]
    cfg.MODEL.FPN.IN_FEATURES = ["s8", "s16"]
    cfg.MODEL.FPN.OUT_CHANNELS = 16
    cfg.MODEL.RETINANET.IN_FEATURES = ["p3", "p4", "p5", "p6", "p7"]
    cfg.MODEL.RETINANET.NUM_CLASSES = 3
    return cfg


def mf_detr_config() -> CfgNode:
    """Returns an MF-DETR with seven queries on the same encoder."""
    cfg = make_tiny_config("MFDETR")
    cfg.MODEL.MOBILE_FORMER.OUT_FEATURES = ["s8", "s16_expanded"]
    for key, value in {
        "IN_FEATURES": ["s8", "s16_expanded"],
        "NUM_BLOCKS": [2, 1, 1],
        "NUM_OBJECT_QUERIES": 7,
        "HIDDEN_DIM": 16,
        "DIM_FEEDFORWARD": 16,
        "NHEADS": 2,
        "NUM_CLASSES": 3,
    }.items():
        cfg.MODEL.MF_DETR[key] = value
    cfg.MODEL.CLASS_NAMES = CLASSES
    cfg.INPUT.DATASET_MAPPER_NAME = "detr"
    cfg.INPUT.MIN_SIZE_TEST, cfg.INPUT.MAX_SIZE_TEST = 64, 96
    return cfg


def resnet_config() -> CfgNode:
    """Returns a classifier without tokens."""
    cfg = classifier_config(IN_FEATURE="res3")
    cfg.MODEL.BACKBONE.NAME = "build_resnet_backbone"
    cfg.MODEL.RESNETS.RES2_OUT_CHANNELS = cfg.MODEL.RESNETS.STEM_OUT_CHANNELS = 8
    cfg.MODEL.RESNETS.WIDTH_PER_GROUP = 8
    cfg.MODEL.RESNETS.OUT_FEATURES = ["res3"]
    return cfg


class TinyRuns:
    """Runs with random weights by name, each made when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @functools.cache  # noqa: B019  there is one, for the session
    def get(self, name: str) -> Run:
        """Returns a run; "qb_heat" has a folder with checkpoints, the others are files."""
        if name == "qb_heat":
            return make_qb_heat(self._folder / "qb_heat")
        cfg, iteration, seed = {
            "untrained": (pretraining_config(), 0, 1),
            "masking": (pretraining_config("MaskTokenMasking"), 9, 0),
            "classifier": (classifier_config(), 9, 0),
            "transformer": (classifier_config("transformer"), 9, 0),
            "retinanet": (retinanet_config(), 9, 0),
            "mf_detr": (mf_detr_config(), 9, 0),
            "mf_detr_1": (mf_detr_config(), 9, 1),
            "resnet": (resnet_config(), 9, 0),
        }[name]
        return make_run(self._folder, cfg, name, iteration=iteration, seed=seed)


def make_run(folder: Path, cfg: CfgNode, label: str, *, iteration: int = 9, seed: int = 0) -> Run:
    """Returns random weights as those of a run after so many steps."""
    torch.manual_seed(seed)
    model = build_model(cfg)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean, -0.1, 0.1)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
    info = WeightsInfo.from_config(cfg, iteration=iteration, commit="")
    path = folder / f"{label}.safetensors"
    save_weights(str(path), model.state_dict(), info)
    return Run.open(path, label=label, device="cpu")


def make_qb_heat(folder: Path) -> Run:
    """Writes the folder of a run of 4 epochs and 40 steps with random linear models."""
    folder.mkdir()
    cfg = pretraining_config()
    cfg.SOLVER.EPOCHS, cfg.SOLVER.MAX_ITER = 4.0, 40
    (folder / "config.yaml").write_text(cfg.dump())
    path = str(make_run(folder, cfg, "model_final").weights)
    weights, _ = read_weights(path)
    for name, tensor in weights.items():
        if name.startswith("predictor."):
            weights[name] = 0.2 * torch.randn_like(tensor)
    save_weights(path, weights, WeightsInfo.from_config(cfg, iteration=39, commit=""))
    for steps in EARLIER:
        part = {k: v * steps / 40 for k, v in weights.items() if k.startswith("predictor.")}
        torch.save({"model": part}, folder / f"model_{steps - 1:07d}.pth")
    return Run.open(folder, device="cpu")


def truncate(run: Run, folder: Path) -> Run:
    """Returns a run "cut" with the config of ``run`` and half of its checkpoint."""
    cut = folder / "cut"
    cut.mkdir()
    (cut / "config.yaml").write_text(run.cfg.dump(), encoding="utf-8")
    content = run.weights.read_bytes()
    (cut / "model_final.safetensors").write_bytes(content[: len(content) // 2])
    return Run.open(cut, device="cpu")
