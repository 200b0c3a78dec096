# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Entries of a zoo of two tiny models."""

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.modeling import build_model

from qbheat_det.checkpoint import WeightsInfo, save_weights
from qbheat_det.config import get_cfg
from qbheat_det.model_zoo import Fingerprint, Metric, OutputStats, ZooEntry
from qbheat_det.model_zoo.index import file_of
from qbheat_det.modeling.backbone.bare import build_bare_backbone
from tests.engine.gradient_cases import BLOCKS
from tests.engine.tiny_detectors import make_retinanet_config

DETECTOR, BACKBONE = "retinanet/tiny", "qb_heat/tiny"
CONTENT = b"weights" * 3000


def make_entry(name: str = DETECTOR, content: bytes = CONTENT, **changes: Any) -> ZooEntry:
    """Returns an entry for a file of that content."""
    entry = ZooEntry(
        name=name,
        task="detection",
        summary="A tiny RetinaNet",
        config="coco/retinanet_285M_finetune.yaml",
        file=file_of(name),
        sha256=hashlib.sha256(content).hexdigest(),
        size=len(content),
        num_params=12,
        madds=34,
        madds_input=(64, 96),
        data="toy shapes",
        data_licence="CC0",
        licence="Apache-2.0",
        command="python tools/train_net.py",
        commit="c0ffee1",
        date="2026-11-21",
        figures=(Metric("AP", 12.5, "%", "toy val", note="by chance"),),
        fingerprint=Fingerprint(1, (OutputStats("s8", (1, 2), 0.0, 1.0, (0.5, -1e-7), 1e-3),)),
    )
    return dataclasses.replace(entry, **changes)


def save_tiny_detector(folder: Path) -> tuple[ZooEntry, CfgNode, dict[str, torch.Tensor]]:
    """Writes a RetinaNet in half precision; returns its entry, its config and what was written."""
    cfg = make_retinanet_config()
    cfg.MODEL.CLASS_NAMES = ["square", "disc", "cross"]
    cfg.MODEL.CATEGORY_IDS = [4, 9, 11]
    cfg.INPUT.MIN_SIZE_TEST, cfg.INPUT.MAX_SIZE_TEST = 64, 96
    with torch.random.fork_rng():
        torch.manual_seed(0)  # of which it finds something: by chance its features grow too large
        model = build_model(cfg)
    return _save(folder, DETECTOR, cfg, model)


def save_tiny_backbone(folder: Path) -> tuple[ZooEntry, CfgNode, dict[str, torch.Tensor]]:
    """The same of a bare Mobile-Former, as ``export_backbone`` writes it."""
    cfg = get_cfg()
    cfg.MODEL.DEVICE = "cpu"
    cfg.MODEL.META_ARCHITECTURE = "QBHeat"
    cfg.MODEL.BACKBONE.NAME = "MobileFormer"
    own = cfg.MODEL.MOBILE_FORMER
    own.VARIANT, own.BLOCKS = "custom", BLOCKS
    own.STEM_CHANNELS, own.EXPANDED_CHANNELS = 8, 32
    own.NUM_TOKENS, own.TOKEN_DIM = 2, 16
    return _save(folder, BACKBONE, cfg, build_bare_backbone(cfg))


def _save(
    folder: Path, name: str, cfg: CfgNode, model: torch.nn.Module
) -> tuple[ZooEntry, CfgNode, dict[str, torch.Tensor]]:
    state = {
        key: value.half() if value.is_floating_point() else value
        for key, value in model.state_dict().items()
    }
    path = folder / file_of(name)
    save_weights(str(path), state, WeightsInfo.from_config(cfg, iteration=7, commit="c0ffee"))
    return make_entry(name, path.read_bytes()), cfg, state
