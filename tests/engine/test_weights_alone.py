# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Prediction from a file of weights alone, its config and classes inside, whoever wrote it."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from detectron2.config import CfgNode
from detectron2.modeling import build_model

from qbheat_det.checkpoint import WeightsInfo, load_run_config, save_weights
from qbheat_det.config import get_cfg
from qbheat_det.core.errors import UserError
from qbheat_det.engine.predict import build_predictor, get_category_id
from tests.engine.tiny_detectors import make_probe_config, make_retinanet_config


def _save_alone(path: Path, cfg: CfgNode, config: str | None = None) -> str:
    """Writes weights that hold all that prediction needs; ``config`` replaces what they say."""
    info = WeightsInfo.from_config(cfg, iteration=1, commit="")
    info = dataclasses.replace(info, config=info.config if config is None else config)
    save_weights(str(path), build_model(cfg).state_dict(), info)
    return str(path)


def test_safetensors_alone_are_enough_to_predict(tmp_path: Path) -> None:
    trained = make_probe_config()
    trained.OUTPUT_DIR = "a folder of whoever trained them"
    weights = _save_alone(tmp_path / "w.safetensors", trained)
    (tmp_path / "config.yaml").write_text("of other weights: true")
    cfg = load_run_config(weights, device="cpu", opts=["INPUT.MIN_SIZE_TEST", "48"])
    assert cfg.MODEL.CLASS_NAMES == ["square", "disc"]
    assert cfg.INPUT.MIN_SIZE_TEST == 48
    assert cfg.OUTPUT_DIR == get_cfg().OUTPUT_DIR
    red = np.full((100, 200, 3), (0, 0, 255), np.uint8)  # BGR, where the model wants RGB
    found = build_predictor(cfg)(red)["instances"]
    assert found.scores.item() == pytest.approx(1)
    assert get_category_id(cfg, int(found.pred_classes)) == 9


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ("MODEL: {DEVICE: [", ""),
        ("MODEL: {CLASS_NAME: [a]}", "MODEL.CLASS_NAMES"),
        ("a: !!python/object/apply:os.system [touch ran]", ""),
        ("_BASE_: /etc/hostname", ""),
        ("[" * 1000, ""),
        ("MODEL: {LOAD_PROPOSALS: true}", "MODEL.LOAD_PROPOSALS"),
        ("DATASETS: {PROPOSAL_FILES_TEST: ['http://a/p.pkl']}", "DATASETS.PROPOSAL_FILES_TEST"),
    ],
)
def test_a_strangers_config_inside_weights_is_read_with_care(
    tmp_path: Path, config: str, named: str
) -> None:
    weights = _save_alone(tmp_path / "w.safetensors", make_probe_config(), config)
    with pytest.raises(UserError, match=named) as caught:
        load_run_config(weights)
    assert weights in str(caught.value)


def test_a_config_beside_weights_makes_nothing_unpickled_unless_it_is_asked_for(
    tmp_path: Path,
) -> None:
    torch.save({"model": {}}, tmp_path / "w.pth")
    (tmp_path / "config.yaml").write_text("DATASETS: {PROPOSAL_FILES_TRAIN: [p.pkl]}")
    weights = f"{tmp_path}/w.pth"
    with pytest.raises(UserError, match=r"config\.yaml.*PROPOSAL_FILES"):
        load_run_config(weights)
    own = load_run_config(weights, f"{tmp_path}/config.yaml")
    assert own.DATASETS.PROPOSAL_FILES_TRAIN == ("p.pkl",)
    cfg = load_run_config(weights, opts=["DATASETS.PROPOSAL_FILES_TRAIN", "()"])
    assert cfg.DATASETS.PROPOSAL_FILES_TRAIN == ()


def test_weights_of_other_classes_than_the_configs_do_not_predict(tmp_path: Path) -> None:
    weights = _save_alone(tmp_path / "w.safetensors", make_retinanet_config())
    cfg = load_run_config(weights, device="cpu")
    build_predictor(cfg)
    named = make_retinanet_config()
    named.MODEL.CLASS_NAMES = ["a", "b", "c"]
    cfg.MODEL.WEIGHTS = _save_alone(tmp_path / "named.safetensors", named)
    cfg.MODEL.CLASS_NAMES = ["a", "c", "b"]
    with pytest.raises(UserError, match=r"\['a', 'b', 'c'\]"):
        build_predictor(cfg)
