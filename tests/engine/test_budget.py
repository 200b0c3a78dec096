# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Epochs, image size and frozen stages for a number of minutes, by hand arithmetic."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from detectron2.config import CfgNode

from qbheat_det.config import dump_config
from qbheat_det.core.errors import UserError
from qbheat_det.data.datasets.toy import ToySpec, prepare_toy_set
from qbheat_det.engine import RunFlags, budget
from qbheat_det.engine.budget import plan_run
from qbheat_det.engine.setup import build_config

SETUP, EVALUATION = 10.0, 2.0  # seconds, of each run and of each epoch
STEP = 8.0  # seconds of an epoch's steps at the recipe's 288 pixels
USUAL = 18  # epochs of the recipe


def measure(cfg: CfgNode, *_: Any, **__: Any) -> Any:
    epochs, area = cfg.SOLVER.EPOCHS, (max(cfg.INPUT.MIN_SIZE_TRAIN) / 288) ** 2
    share = 0.25 if cfg.MODEL.BACKBONE.FREEZE_AT == 5 else 1.0
    costs = {
        "Set-up": (SETUP, 1),
        "Step of 4 images": (STEP * share * area, epochs),
        "Evaluation of 4 images": (EVALUATION * area, epochs),
    }
    return SimpleNamespace(costs=costs, total_seconds=sum(a * b for a, b in costs.values()))


@pytest.fixture
def flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFlags:
    monkeypatch.setattr(budget, "dry_run", measure)
    data = prepare_toy_set(ToySpec(name="tiny", num_images=4, image_size=64), tmp_path / "toy")
    file = str(Path(data) / "annotations.json")
    return RunFlags(data=file, val=file, output=str(tmp_path / "run"), opts=["SEED", "1"])


@pytest.mark.parametrize(
    ("seconds", "size", "freeze", "each"),
    [
        (30, None, True, 4.0),  # 192 pixels allow 4.2 epochs, less than a third of 18
        (60, 192, False, 10.0 * (192 / 288) ** 2),  # 10.6 epochs
        (100, 224, False, 10.0 * (224 / 288) ** 2),  # 13.9 epochs, and 8.5 at 288 pixels
        (180, None, False, 10.0),
        (340, 384, False, 10.0 * (384 / 288) ** 2),
        (2000, 512, False, 10.0 * (512 / 288) ** 2),
    ],
)
def test_the_largest_images_with_enough_epochs_fill_the_time(
    flags: RunFlags, seconds: float, size: int | None, freeze: bool, each: float
) -> None:
    flags.minutes = seconds / 60
    chosen, summary = plan_run(flags, lambda cfg: None)  # type: ignore[arg-type, return-value]
    assert (chosen.image_size, chosen.freeze) == (size, freeze)
    # Building configs takes part of the time.
    expected = min((0.95 * seconds - SETUP) / each, 3 * USUAL)
    assert chosen.epochs == pytest.approx(expected, abs=1.0)
    assert f"--epochs {chosen.epochs:g}" in summary
    cfg = build_config(chosen)
    assert cfg.SOLVER.EPOCHS == chosen.epochs
    assert max(cfg.INPUT.MIN_SIZE_TRAIN) == (size or 288)


def test_given_flags_stay_and_a_resumed_run_keeps_its_plan(flags: RunFlags) -> None:
    flags.minutes, flags.image_size = 5, 160
    chosen, _ = plan_run(flags, lambda cfg: None)  # type: ignore[arg-type, return-value]
    assert chosen.image_size == 160
    cfg = build_config(chosen)
    Path(cfg.OUTPUT_DIR).mkdir()
    (Path(cfg.OUTPUT_DIR) / "config.yaml").write_text(dump_config(cfg))
    (Path(cfg.OUTPUT_DIR) / "model_0000001.pth").touch()
    (Path(cfg.OUTPUT_DIR) / "last_checkpoint").write_text("model_0000001.pth")
    flags.resume, flags.image_size, flags.minutes = True, None, 50
    resumed, _ = plan_run(flags, lambda cfg: None)  # type: ignore[arg-type, return-value]
    assert (resumed.image_size, resumed.epochs) == (160, chosen.epochs)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"epochs": 3}, "--epochs"),
        ({"minutes": 0.05}, "--minutes 0.05"),
        ({"config_file": "custom/cached_retinanet_285M_probe.yaml"},
         "MODEL.CACHE_FEATURES"),
    ],
)  # fmt: skip
def test_a_plan_that_cannot_be_made_is_a_sentence(
    flags: RunFlags, change: dict[str, Any], named: str
) -> None:
    flags.minutes = 5
    for name, value in change.items():
        setattr(flags, name, value)
    with pytest.raises(UserError) as error:
        plan_run(flags, lambda cfg: None)  # type: ignore[arg-type, return-value]
    assert named in str(error.value)
