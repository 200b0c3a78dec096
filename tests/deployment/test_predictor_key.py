# Copyright (c) qbheat_det contributors. Apache-2.0.
"""MODEL.DEPLOY.ENABLED: a model that deploys itself, and follows changes of its weights."""

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from detectron2.engine import DefaultPredictor
from torch.testing import assert_close

from qbheat_det.core.errors import UserError
from qbheat_det.deployment import Deployed, predictor_key
from qbheat_det.engine import Trainer
from tests.export.tiny_models import build, make_config

from .test_deploy import assert_same_boxes, entries

FAST = {
    "MODEL__DEPLOY__ENABLED": True,
    "MODEL__DEPLOY__COMPILE": "off",
    "MODEL__DEPLOY__KEEP_MEMORY": False,
}
SQUARE = entries((32, 32))


def build_with_key() -> Any:
    return build(make_config("classifier", **FAST))


def is_deployed(model: Any) -> bool:
    return isinstance(model.forward._fast, Deployed)


def test_the_key_deploys_a_default_predictors_model(tmp_path: Path) -> None:
    cfg = make_config("mf_detr", **{**FAST, "MODEL__DEPLOY__ENABLED": False})
    model = build(cfg)
    cfg.MODEL.WEIGHTS = str(tmp_path / "weights.pth")
    torch.save({"model": model.state_dict()}, cfg.MODEL.WEIGHTS)
    picture = np.random.default_rng(0).integers(0, 256, (60, 80, 3), dtype=np.uint8)
    expected = DefaultPredictor(cfg)(picture)
    cfg.MODEL.DEPLOY.ENABLED = True
    predictor = DefaultPredictor(cfg)
    for _ in range(2):
        assert_same_boxes([predictor(picture)], [expected])
    assert is_deployed(predictor.model)
    with torch.no_grad():  # new weights: evaluation is of them, not of what was deployed
        for parameter in predictor.model.parameters():
            parameter.zero_()
    assert float(predictor(picture)["instances"].scores.max()) < 0.5


def test_the_key_leaves_training_alone() -> None:
    model = build_with_key()
    model.train()
    losses = model([{**entry, "label": 1} for entry in SQUARE])
    losses["loss_cls"].backward()
    model.eval()
    model(SQUARE)
    assert not is_deployed(model)  # evaluated in between: not the time to compile
    torch.save(model.state_dict(), io.BytesIO())


def halve(model: Any) -> None:
    with torch.no_grad():
        model.decoder.classifier.weight.mul_(0.5)


def move_mean(model: Any) -> None:
    model.pixel_mean.add_(50)


def take_others(model: Any) -> None:
    state = {name: value * 0.5 for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


@pytest.mark.parametrize("change", [halve, move_mean, take_others])
@torch.no_grad()
def test_what_changes_afterwards_is_what_predicts(change: Callable[[Any], None]) -> None:
    model, twin = build_with_key(), build(make_config("classifier"))
    before = model(SQUARE)[0]["scores"]
    assert_close(before, twin(SQUARE)[0]["scores"])
    model(SQUARE)
    assert is_deployed(model)
    change(model)
    change(twin)
    found, expected = (each(SQUARE)[0]["scores"] for each in (model, twin))
    assert_close(found, expected)
    assert float((before - expected).abs().max()) > 1e-4
    assert not is_deployed(model)


def test_a_model_that_is_built_in_inference_mode_follows_changes_too() -> None:
    with torch.inference_mode():
        model = build_with_key()
        before = model(SQUARE)[0]["scores"]
        assert is_deployed(model)
        halve(model)
        assert float((before - model(SQUARE)[0]["scores"]).abs().max()) > 1e-4


@torch.no_grad()
def test_a_moving_average_is_evaluated_in_its_plain_form() -> None:
    model = build_with_key()
    average = copy.deepcopy(model.train()).eval()
    average(SQUARE)
    assert not is_deployed(average)
    model = build_with_key()
    model(SQUARE)
    twin = copy.deepcopy(model)
    twin.decoder.classifier.weight.mul_(0.5)
    assert_close(twin(SQUARE), twin.forward._fast(SQUARE))  # its own weights, not the original's
    assert float((twin(SQUARE)[0]["scores"] - model(SQUARE)[0]["scores"]).abs().max()) > 1e-4


def test_a_trainer_never_deploys() -> None:
    cfg = make_config("classifier", **FAST)
    model = Trainer.build_model(cfg)
    assert "forward" not in model.__dict__
    assert cfg.MODEL.DEPLOY.ENABLED
    assert "forward" in build_with_key().__dict__


@pytest.mark.parametrize("kept", [True, False])
def test_the_key_says_whether_freed_memory_is_kept(
    monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    node = make_config("classifier").MODEL.DEPLOY
    assert node.KEEP_MEMORY  # the default
    node.KEEP_MEMORY = kept
    seen: dict[str, Any] = {}
    monkeypatch.setattr(predictor_key, "deploy", lambda model, **settings: seen.update(settings))
    predictor_key.deploy_by_config(torch.nn.Identity(), node)
    assert seen["keep_memory"] is kept


@torch.no_grad()
def test_a_setting_that_changes_afterwards_counts() -> None:
    model = build_with_key()
    model(SQUARE)
    model(SQUARE)
    assert is_deployed(model)
    model.decoder.note = 3  # any number among a part's attributes
    model(SQUARE)
    assert not is_deployed(model)


def test_a_wrong_key_is_refused_when_the_model_is_built() -> None:
    with pytest.raises(UserError, match="precision is one of float32, bfloat16, not 'half'"):
        build(make_config("classifier", **{**FAST, "MODEL__DEPLOY__PRECISION": "half"}))
