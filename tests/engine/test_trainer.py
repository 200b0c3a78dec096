# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What a whole run leaves behind: averages, the best weights, few checkpoints, a record."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from detectron2.modeling import build_model

from qbheat_det.checkpoint import read_weights
from qbheat_det.config import load_config
from qbheat_det.core.errors import UserError
from qbheat_det.engine.evaluation import Evaluation

from . import tiny_training
from .conftest import TrainAfresh
from .tiny_training import state

NAMES = ["model_0000000", "model_0000001", "model_0000002", "model_final"]


@pytest.fixture(scope="module")
def averaged(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in epochs that averages its weights, with evaluated weights in ``evaluated.pt``."""
    folder = tmp_path_factory.mktemp("averaged")
    opts = {
        "SOLVER.EPOCHS": "0.6",  # of 12 images, two a step: rounded up to 4 iterations
        "SOLVER.CHECKPOINT_PERIOD": "1",
        "SOLVER.CHECKPOINTS_KEPT": "0",
        "SOLVER.REFERENCE_BATCH_SIZE": "8",
        "SOLVER.LR_SCALING": "linear",
        "SOLVER.EMA.ENABLED": "True",
        "SOLVER.EMA.DECAY": "0.5",
        "SOLVER.EMA.WARMUP": "False",
    }
    whole = Evaluation.__call__

    def note(self: Evaluation, model: torch.nn.Module) -> dict[str, Any]:
        torch.save(model.state_dict(), folder / "evaluated.pt")
        return whole(self, model)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Evaluation, "__call__", note)
        tiny_training.train(folder, tiny_data, opts)
    return folder


def test_the_average_is_that_of_all_weights_and_buffers(averaged: Path) -> None:
    raw = [state(averaged, name)["model"] for name in NAMES]
    found = [state(averaged, name)["ema"] for name in NAMES]
    assert any("running_var" in key for key in raw[0])
    for key, first in raw[0].items():
        if first.is_floating_point():
            average = first.double()  # timm's average starts after the first step
            torch.testing.assert_close(found[0][key], first, rtol=0, atol=0)
            for weights, expected in zip(raw[1:], found[1:], strict=True):
                average = (average + weights[key].double()) / 2
                torch.testing.assert_close(expected[key].double(), average, rtol=1e-5, atol=1e-7)


def test_the_average_is_what_is_evaluated_and_exported(averaged: Path) -> None:
    average = state(averaged)["ema"]
    evaluated = torch.load(averaged / "evaluated.pt", weights_only=True)
    exported, info = read_weights(str(averaged / "model_final.safetensors"))
    assert info.iteration == 3
    for weights in (evaluated, exported):
        torch.testing.assert_close(dict(weights), average, rtol=0, atol=0)
    raw = state(averaged)["model"]
    assert any(not torch.equal(exported[key], raw[key]) for key in raw if "running_var" in key)


def test_the_config_in_the_folder_and_in_the_weights_makes_the_same_run(averaged: Path) -> None:
    cfg = load_config(averaged / "config.yaml")
    assert cfg.SOLVER.MAX_ITER == 4
    assert cfg.SOLVER.BASE_LR == pytest.approx(0.002 * 2 / 8)
    weights, info = read_weights(str(averaged / "model_final.safetensors"))
    assert yaml.safe_load(info.config) == yaml.safe_load((averaged / "config.yaml").read_text())
    assert info.class_names == tuple(cfg.MODEL.CLASS_NAMES)
    (averaged / "alone.yaml").write_text(info.config)
    model = build_model(load_config(averaged / "alone.yaml"))
    assert not any(model.load_state_dict(weights))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("MODEL.DEVICE", "gpu"),
        ("INPUT.MIN_SIZE_TRAIN", "()"),
        ("INPUT.FORMAT", "XYZ"),
        ("SOLVER.WEIGHT_DECAY", "-0.1"),
        ("TEST.PRECISE_BN.ENABLED", "True"),
        ("SOLVER.AMP.PRECISION", "half"),
        ("SOLVER.EMA.DECAY", "1.0"),
        ("SOLVER.ACCUMULATE", "3"),
        ("SOLVER.LOG_PERIOD", "0"),
        ("SOLVER.IMS_PER_BATCH", "0"),
        ("MODEL.RETINANET.NUM_CLASSES", "9"),
        ("DATASETS.TRAIN", "('qbheat_toy_train',)"),
    ],
)
def test_values_out_of_range_are_refused_by_their_key(
    train_afresh: TrainAfresh, tmp_path: Path, key: str, value: str
) -> None:
    enabled = {"SOLVER.AMP.ENABLED": "True", "SOLVER.EMA.ENABLED": "True"}
    section = key.rpartition(".")[0] + ".ENABLED"
    opts = {section: enabled[section]} if section in enabled else {}
    named = key.removesuffix(".ENABLED").replace(".", r"\.")
    with pytest.raises(UserError, match=named):
        train_afresh(tmp_path, {**opts, key: value})
    assert not list(tmp_path.glob("*.pth"))
