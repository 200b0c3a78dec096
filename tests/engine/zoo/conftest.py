# Copyright (c) qbheat_det contributors. Apache-2.0.
"""A shelf of the package's own that is empty, and a tiny trained backbone to put on it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from detectron2.config import CfgNode
from qbheat_det.engine.zoo.trained_model import Costs

import qbheat_det.model_zoo.add as add_module
from qbheat_det.checkpoint import WeightsInfo, save_weights
from qbheat_det.model_zoo import Fingerprint, ZooEntry, index, sources
from qbheat_det.model_zoo.add import Origin, add_entry
from qbheat_det.model_zoo.api import TrainedModel, open_trained
from qbheat_det.model_zoo.fingerprint import compute_fingerprint
from qbheat_det.model_zoo.verify import count_costs
from qbheat_det.modeling.backbone.bare import build_bare_backbone
from tests.modeling.tiny_pretraining import make_tiny_config

ORIGIN = Origin(
    summary="A tiny Mobile-Former",
    config="custom/qb_heat_285M_cpu.yaml",
    data="drawn shapes",
    data_licence="CC0-1.0",
    command="python tools/train_net.py --config-file …",
)
NAME = "qb_heat/tiny_shapes"
AddEntry = Callable[..., ZooEntry]


@dataclass(frozen=True)
class Trained:
    """A file of weights as a run leaves it."""

    path: Path
    cfg: CfgNode
    state: dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that stands for the package's."""
    for name in ("QBHEAT_ZOO", "QBHEAT_ZOO_URL", "QBHEAT_ZOO_HUB", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("FVCORE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sources, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setattr(index, "INDEX_FILE", tmp_path / "index.json")
    index.save_index([])
    return tmp_path / "shipped"


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A bare backbone, float32, with what a run on someone's machine writes into its config."""
    cfg = make_tiny_config()
    cfg.INPUT.DATASET_MAPPER_NAME = "pretrain"
    cfg.OUTPUT_DIR = "runs/of/someone"
    cfg.MODEL.WEIGHTS = "runs/before.safetensors"
    cfg.MODEL.CACHE_FEATURES.FOLDER = "/home/someone/cache"
    torch.manual_seed(5)
    backbone = build_bare_backbone(cfg)
    state = {key: value.clone() for key, value in backbone.state_dict().items()}
    path = tmp_path_factory.mktemp("run") / "backbone.safetensors"
    info = WeightsInfo.from_config(cfg, iteration=7, commit="c0ffee12-dirty")
    save_weights(str(path), state, info)
    return Trained(path, cfg, state)


@pytest.fixture(scope="session")
def opened(trained: Trained) -> tuple[TrainedModel, Costs, Fingerprint]:
    """That backbone with what is found of it, for tests that look at something else."""
    model = open_trained(str(trained.path))
    return model, count_costs(model), compute_fingerprint(model.model, model.cfg)


@pytest.fixture
def quick(opened: tuple[TrainedModel, Costs, Fingerprint], monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets ``add_entry`` find at once what it would find."""
    model, costs, fingerprint = opened
    monkeypatch.setattr(add_module, "open_trained", lambda path: model)
    monkeypatch.setattr(add_module, "count_costs", lambda trained: costs)
    monkeypatch.setattr(add_module, "compute_fingerprint", lambda *args: fingerprint)
    real = add_module.load_run_config

    def load(path: str, **more: Any) -> CfgNode:
        return model.cfg if Path(path).is_file() else real(path, **more)

    monkeypatch.setattr(add_module, "load_run_config", load)


@pytest.fixture
def add(trained: Trained) -> AddEntry:
    """Adds that backbone."""

    def add_tiny(name: str = NAME, weights: object = None, **more: Any) -> ZooEntry:
        return add_entry(str(weights or trained.path), name, more.pop("origin", ORIGIN), **more)

    return add_tiny
