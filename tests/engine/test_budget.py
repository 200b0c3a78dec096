# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Epochs, image size and stages for a number of minutes, by hand arithmetic."""

import dataclasses
import functools
import itertools
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from qbheat_det.config import dump_config, load_config
from qbheat_det.core.errors import UserError
from qbheat_det.engine import RunFlags, assemble_run, minutes

SETUP, EVALUATION = 10.0, 2.0  # seconds, of each run and of each epoch
STEP = 8.0  # seconds of an epoch's steps at the recipe's 384 pixels
CACHED_STEP = 0.5  # the same in the first stage, on cached features
USUAL, USUAL_FIRST = 18, 20  # epochs of the two stages
FIRST = SETUP + USUAL_FIRST * (EVALUATION + CACHED_STEP)
PLANNING = 1.0


def measure(cfg, *_, larger=1, **__):
    """``larger`` is the factor by which images above 384 pixels are slower than expected."""
    epochs, area = cfg.SOLVER.EPOCHS, (max(cfg.INPUT.MIN_SIZE_TRAIN) / 384) ** 2
    area *= larger if area > 1 else 1
    is_cached = cfg.MODEL.CACHE_FEATURES.ENABLED
    costs = {
        "Set-up": (SETUP, 1),
        "Step of 4 images": (CACHED_STEP if is_cached else STEP * area, epochs),
        "Evaluation of 4 images": (EVALUATION if is_cached else EVALUATION * area, epochs),
    }
    return SimpleNamespace(costs=costs, total_seconds=sum(a * b for a, b in costs.values()))


@pytest.fixture
def flags(few_data, tmp_path, monkeypatch):
    monkeypatch.setattr(minutes, "dry_run", measure)
    monkeypatch.setattr(minutes, "gc", Mock())  # nothing to collect, which would take a while
    clock = itertools.count(step=PLANNING)
    monkeypatch.setattr(minutes, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(minutes, "count_epochs", lambda cfg, _: cfg.SOLVER.EPOCHS)
    file = str(few_data / "annotations.json")
    return RunFlags(data=file, val=file, output=str(tmp_path / "run"), opts=["SEED", "1"])


def fit(flags, **changes):
    """Returns the planned stages, and the explanation of the plan."""
    flags = dataclasses.replace(flags, **changes)
    stages = minutes.fit_minutes(assemble_run(flags), flags, lambda cfg, fill: None)
    return stages, stages[0].title.splitlines()[0]


@pytest.mark.parametrize(
    ("seconds", "size", "each", "twice"),  # ``twice``: size for twice the time
    [
        (140, 256, 10.0 * (256 / 384) ** 2, 384),  # 14.2 epochs after the first stage
        (160, 288, 10.0 * (288 / 384) ** 2, 512),
        (240, 384, 10.0, 672),
        (400, 512, 10.0 * (512 / 384) ** 2, 672),
        (2000, 672, 10.0 * (672 / 384) ** 2, 672),
    ],
)
def test_the_largest_images_with_enough_epochs_fill_the_time(flags, seconds, size, each, twice):
    (first, last), summary = fit(flags, minutes=seconds / 60)
    assert first.cfg.SOLVER.EPOCHS == USUAL_FIRST
    epochs = last.cfg.SOLVER.EPOCHS
    expected = min((0.95 * seconds - FIRST - SETUP - PLANNING) / each, 3 * USUAL)
    assert epochs == pytest.approx(expected, abs=0.05)
    assert last.cfg.SOLVER.MIN_ITER == 0
    assert max(last.cfg.INPUT.MIN_SIZE_TRAIN) == size
    assert f"--epochs {epochs:g}" in summary
    assert (f"--image-size {size} after" in summary) == (size != 384)
    assert summary.endswith(f" --image-size {twice}")


def test_images_that_are_slower_than_their_area_says_are_smaller(flags, monkeypatch):
    monkeypatch.setattr(minutes, "dry_run", functools.partial(measure, larger=2))
    (_, last), _ = fit(flags, minutes=400 / 60)
    assert max(last.cfg.INPUT.MIN_SIZE_TRAIN) == 384
    expected = (0.95 * 400 - FIRST - SETUP - PLANNING) / 10
    assert last.cfg.SOLVER.EPOCHS == pytest.approx(expected, abs=0.05)


def test_short_of_time_a_run_has_only_its_first_stage(flags):
    (stage,), summary = fit(flags, minutes=60 / 60, batch=4)
    recipe = "custom/cached_retinanet_lite0_probe.yaml"
    assert stage.cfg.SOLVER.IMS_PER_BATCH == load_config(recipe).SOLVER.IMS_PER_BATCH
    assert stage.cfg.MODEL.CACHE_FEATURES.ENABLED
    assert str(stage.folder) == flags.output
    expected = (0.95 * 60 - SETUP - PLANNING) / (EVALUATION + CACHED_STEP)
    assert stage.cfg.SOLVER.EPOCHS == pytest.approx(expected, abs=0.05)
    assert recipe in summary
    assert summary.endswith("Twice the time allows --epochs 10 --image-size 256")
    stop(stage.cfg)
    (resumed,), _ = fit(flags, minutes=50, batch=4, resume=True)
    assert dump_config(resumed.cfg) == dump_config(stage.cfg)
    assert resumed.resume


def stop(cfg):
    """Writes what a run with this config leaves when it is stopped."""
    folder = Path(cfg.OUTPUT_DIR)
    folder.mkdir()
    (folder / "config.yaml").write_text(dump_config(cfg))
    (folder / "model_0000001.pth").touch()
    (folder / "last_checkpoint").write_text("model_0000001.pth")


def test_a_finished_first_stage_is_not_planned_again(flags):
    first = Path(flags.output) / "first_stage" / "model_final.safetensors"
    first.parent.mkdir(parents=True)
    first.touch()
    (_, last), _ = fit(flags, minutes=60 / 60, resume=True)
    assert max(last.cfg.INPUT.MIN_SIZE_TRAIN) == 256


def test_given_flags_stay_and_a_resumed_run_keeps_its_plan(flags):
    (_, last), _ = fit(flags, minutes=5, image_size=160)
    assert max(last.cfg.INPUT.MIN_SIZE_TRAIN) == 160
    stop(last.cfg)
    (resumed,), _ = fit(flags, minutes=50, resume=True)
    assert max(resumed.cfg.INPUT.MIN_SIZE_TRAIN) == 160
    assert resumed.cfg.SOLVER.EPOCHS == last.cfg.SOLVER.EPOCHS
    moved = Path(flags.output).rename(f"{flags.output}_moved")
    (resumed,), _ = fit(flags, minutes=50, resume=True, output=str(moved))
    assert resumed.folder == moved


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"epochs": 3}, "--epochs"),
        ({"minutes": 0.05}, "--minutes 0.05"),
        ({"opts": ["SOLVER.EPOCHS", "0", "SOLVER.MAX_ITER", "5"]}, "SOLVER.EPOCHS"),
    ],
)  # fmt: skip
def test_a_plan_that_cannot_be_made_is_a_sentence(flags, change, named):
    with pytest.raises(UserError) as error:
        fit(flags, **{"minutes": 5, **change})
    assert named in str(error.value)


def test_slow_steps_end_with_the_time(flags, monkeypatch):
    monkeypatch.setattr(minutes, "dry_run", lambda cfg, build, num_steps: build(cfg))
    trainer = SimpleNamespace(register_hooks=lambda hooks: [one.after_step() for one in hooks * 9])
    flags = dataclasses.replace(flags, minutes=8 / 60)  # eight of the clock's seconds
    with pytest.raises(UserError, match="--minutes"):
        minutes.fit_minutes(assemble_run(flags), flags, lambda cfg, fill: trainer)
