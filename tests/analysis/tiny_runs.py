# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Tiny models of every kind in checkpoints, and images for them."""

import functools
import json

import torch
from detectron2.modeling import build_model
from torch import nn

from qbheat_det.analysis.run import Run
from qbheat_det.checkpoint import WeightsInfo, read_weights, save_weights
from tests.data.pictures import draw, save
from tests.modeling.tiny_pretraining import make_tiny_config

CLASSES = ["cat", "dog", "bird"]


def make_images(folder, number=3):
    """Draws images of several sizes; returns their folder."""
    for index in range(number):
        save(folder / f"{index}.png", draw(80 + 8 * index, 96, seed=index))
    return folder


def make_config(meta_arch, mapper, *opts):
    """Returns the config of a model on the same encoder with the overrides."""
    cfg = make_tiny_config(meta_arch)
    cfg.INPUT.DATASET_MAPPER_NAME = mapper
    cfg.merge_from_list(list(opts))
    return cfg


def pretraining_config(meta_arch="QBHeat"):
    """Returns one of 64 pixels, 4 x 4 positions."""
    return make_config(meta_arch, "pretrain")


def classifier_config(decoder="linear", **classifier):
    """Returns one of the same encoder, with its tokens, at 80 pixels: 5 x 5 positions."""
    cfg = make_config(
        *("ImageClassifier", "classify", "INPUT.PRETRAIN.SIZE", 80, "MODEL.CLASS_NAMES", CLASSES),
        *("MODEL.MOBILE_FORMER.OUT_FEATURES", ["s16_expanded", "tokens"]),
    )
    keys = {"NUM_CLASSES": 3, "DECODER": decoder, "WIDTH": 64, "IN_FEATURE": "s16_expanded"}
    cfg.MODEL.CLASSIFIER.update(keys | classifier)
    return cfg


def retinanet_config():
    """Returns a RetinaNet on the same encoder."""
    return make_config(
        *("SyncRetinaNet", "default", "MODEL.BACKBONE.NAME", "build_mobile_former_fpn_backbone"),
        *("MODEL.MOBILE_FORMER.OUT_FEATURES", ["s8", "s16"], "MODEL.RETINANET.NUM_CLASSES", 3),
        *("MODEL.FPN.IN_FEATURES", ["s8", "s16"], "MODEL.FPN.OUT_CHANNELS", 16),
        *("MODEL.RETINANET.IN_FEATURES", ["p3", "p4", "p5", "p6", "p7"]),
    )


def mf_detr_config():
    """Returns an MF-DETR with seven queries on the same encoder."""
    cfg = make_config(
        *("MFDETR", "detr", "MODEL.MOBILE_FORMER.OUT_FEATURES", ["s8", "s16_expanded"]),
        *("MODEL.CLASS_NAMES", CLASSES, "INPUT.MIN_SIZE_TEST", 64, "INPUT.MAX_SIZE_TEST", 96),
        *("MODEL.MF_DETR.IN_FEATURES", ["s8", "s16_expanded"]),
    )
    keys = {"NUM_OBJECT_QUERIES": 7, "HIDDEN_DIM": 16, "DIM_FEEDFORWARD": 16, "NHEADS": 2}
    cfg.MODEL.MF_DETR.update(keys | {"NUM_CLASSES": 3, "NUM_BLOCKS": [2, 1, 1]})
    return cfg


def resnet_config():
    """Returns a classifier without tokens."""
    cfg = classifier_config(IN_FEATURE="res3")
    cfg.MODEL.BACKBONE.NAME = "build_resnet_backbone"
    keys = {"RES2_OUT_CHANNELS": 8, "STEM_OUT_CHANNELS": 8, "WIDTH_PER_GROUP": 8}
    cfg.MODEL.RESNETS.update(keys | {"OUT_FEATURES": ["res3"]})
    return cfg


class TinyRuns:
    """Runs with random weights by name, each made when it is first asked for."""

    def __init__(self, folder):
        self._folder = folder

    @functools.cache  # noqa: B019  there is one, for the session
    def get(self, name):
        """Returns a run; "qb_heat" has a folder with checkpoints, the others are files."""
        if name == "qb_heat":
            return make_qb_heat(self._folder / "qb_heat")
        cfg, iteration, seed = {
            "untrained": (pretraining_config(), 0, 1),
            "masking": (pretraining_config("MaskTokenMasking"), 9, 0),
            "classifier": (classifier_config(), 9, 0),
            "retinanet": (retinanet_config(), 9, 0),
            "mf_detr": (mf_detr_config(), 9, 0),
            "resnet": (resnet_config(), 9, 0),
        }[name]
        return make_run(self._folder, cfg, name, iteration=iteration, seed=seed)


def make_run(folder, cfg, label, *, iteration=9, seed=0):
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


def make_qb_heat(folder):
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
    part = {k: v / 4 for k, v in weights.items() if k.startswith("predictor.")}
    torch.save({"model": part}, folder / "model_0000009.pth")  # after 10 steps
    return Run.open(folder, device="cpu")


def truncate(run, folder):
    """Returns a run "cut" with the config of ``run`` and half of its checkpoint."""
    cut = folder / "cut"
    cut.mkdir()
    (cut / "config.yaml").write_text(run.cfg.dump(), encoding="utf-8")
    content = run.weights.read_bytes()
    (cut / "model_final.safetensors").write_bytes(content[: len(content) // 2])
    return Run.open(cut, device="cpu")


def write_run(folder, cfg):
    """Writes the folder of a run with random weights that ended after ten steps."""
    folder.mkdir(parents=True)
    make_run(folder, cfg, "model_final")
    (folder / "config.yaml").write_text(cfg.dump(), encoding="utf-8")
    records = [{"iteration": 4, "total_loss": 2.0}, {"iteration": 9}]
    lines = "".join(f"{json.dumps(record)}\n" for record in records)
    (folder / "metrics.json").write_text(lines, encoding="utf-8")
    return folder
