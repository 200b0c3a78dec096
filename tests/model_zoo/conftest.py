# Copyright (c) qbheat_det contributors. Apache-2.0.
"""An empty zoo, apart from this machine's; a server; tiny models to put into the zoo."""

import dataclasses
import hashlib
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from detectron2.config import CfgNode
from detectron2.modeling import build_model
from torch import Tensor

from docs.add_to_zoo import render_index
from qbheat_det.checkpoint import WeightsInfo, save_weights
from qbheat_det.model_zoo import Metric, ZooEntry, index, sources
from qbheat_det.modeling.backbone.fpn import build_bare_backbone
from tests.engine.tiny_detectors import make_retinanet_config
from tests.modeling.tiny_pretraining import make_tiny_config

DETECTOR, BACKBONE = "retinanet/tiny", "qb_heat/tiny"
CONTENT = b"weights" * 3000


def make_entry(name=DETECTOR, content=CONTENT, **changes):
    """Returns an entry for a file of that content."""
    entry = ZooEntry(
        name=name,
        task="detection",
        summary="A tiny RetinaNet",
        config="coco/retinanet_285M_finetune.yaml",
        file=f"{name.replace('/', '-')}.safetensors",
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
        metrics=(Metric("AP", 12.5, "%", "toy val", note="by chance"),),
    )
    return dataclasses.replace(entry, **changes)


def save_index(entries):
    index.INDEX_FILE.write_bytes(render_index(entries))


@pytest.fixture(autouse=True)
def shipped(tmp_path, monkeypatch):
    """The folder in the place of the package's weights; its index is empty."""
    monkeypatch.delenv("QBHEAT_ZOO", raising=False)
    monkeypatch.setenv("FVCORE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sources, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setattr(index, "INDEX_FILE", tmp_path / "index.json")
    save_index([])
    return tmp_path / "shipped"


@pytest.fixture
def ship(shipped):
    """Puts an entry and its file into the package."""

    def put(name=DETECTOR, content=CONTENT, **changes):
        entry = make_entry(name, content, **changes)
        save_index([*index.list_entries(), entry])
        shipped.mkdir(exist_ok=True)
        (shipped / entry.file).write_bytes(content)
        return entry

    return put


@dataclass(frozen=True)
class Trained:
    """A file of weights as a run leaves it, with its config and tensors."""

    path: Path
    cfg: CfgNode
    state: dict[str, Tensor]


@pytest.fixture(scope="session")
def detector(tmp_path_factory):
    """A tiny RetinaNet."""
    cfg = make_retinanet_config()
    cfg.MODEL.CLASS_NAMES, cfg.MODEL.CATEGORY_IDS = ["square", "disc", "cross"], [4, 9, 11]
    cfg.INPUT.MIN_SIZE_TEST, cfg.INPUT.MAX_SIZE_TEST = 64, 96
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = build_model(cfg)
    return _save(tmp_path_factory.mktemp("detector"), cfg, model)


@pytest.fixture(scope="session")
def backbone(tmp_path_factory):
    """A tiny bare Mobile-Former whose config names folders of someone's machine."""
    cfg = make_tiny_config()
    cfg.INPUT.DATASET_MAPPER_NAME = "pretrain"
    cfg.OUTPUT_DIR = "runs/of/someone"
    cfg.MODEL.WEIGHTS = "runs/before.safetensors"
    cfg.MODEL.CACHE_FEATURES.FOLDER = "/home/someone/cache"
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = build_bare_backbone(cfg)
    return _save(tmp_path_factory.mktemp("backbone"), cfg, model)


def _save(folder, cfg, model):
    path, state = folder / "model_final.safetensors", model.state_dict()
    save_weights(
        str(path), state, WeightsInfo.from_config(cfg, iteration=7, commit="c0ffee1-dirty")
    )
    return Trained(path, cfg, {key: tensor.clone() for key, tensor in state.items()})
