# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Epochs, views, image size and stages for a number of minutes, by hand arithmetic."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest

from qbheat_det.config import dump_config, load_config
from qbheat_det.core.errors import UserError
from qbheat_det.engine import RunFlags, assemble_run, minutes
from qbheat_det.engine.dry_run import DryRunReport

SETUP, EVALUATION = 10.0, 2.0  # seconds, of each run and of each epoch
STEP = 8.0  # seconds of an epoch's steps at the recipe's 384 pixels
CACHED_STEP = 0.5  # the same in the first stage, on cached features
USUAL, USUAL_FIRST = 18, 20  # epochs of the two stages
FIRST = SETUP + USUAL_FIRST * (EVALUATION + CACHED_STEP)
PLANNING = 1.0  # seconds to time a stage
CACHED = "custom/cached_retinanet_lite0_probe.yaml"


class Machine:
    """A machine with a clock, on which stages take the seconds above.

    Attributes:
        now: what the clock shows.
        setup, encoding: seconds of the set-up, and to encode four views of each image.
        timed: configs of the stages that were timed.
    """

    def __init__(self):
        self.now = 1000.0
        self.setup = SETUP
        self.encoding = 0.0
        self.timed = []

    def monotonic(self):
        return self.now

    def dry_run(self, cfg, build_trainer, *, num_steps):
        self.now += PLANNING
        self.timed.append(cfg)
        epochs = cfg.SOLVER.EPOCHS
        costs = {
            "Set-up": (self.setup, 1),
            "Step of 4 images": (STEP, epochs),
            "Evaluation of 4 images": (EVALUATION, epochs),
        }
        if cfg.MODEL.CACHE_FEATURES.ENABLED:
            costs["Step of 4 images"] = (CACHED_STEP, epochs)
            costs["Encoding of 16 views"] = (self.encoding, 1)
        return DryRunReport(model="", costs=costs, memory={}, disks={})


@pytest.fixture
def machine(monkeypatch):
    machine = Machine()
    monkeypatch.setattr(minutes, "dry_run", machine.dry_run)
    monkeypatch.setattr(minutes, "time", machine)
    monkeypatch.setattr(minutes, "gc", SimpleNamespace(collect=lambda: None))
    monkeypatch.setattr(minutes, "count_epochs", lambda cfg, _: cfg.SOLVER.EPOCHS)
    monkeypatch.setattr(minutes, "_MIN_STEPS", 2)  # of 4 images: 4 epochs of the first stage
    return machine


@pytest.fixture
def flags(few_data, tmp_path, machine):
    file = str(few_data / "annotations.json")
    return RunFlags(data=file, val=file, output=str(tmp_path / "run"), opts=["SEED", "1"])


def fit(flags, **changes):
    """Returns the planned stages, and the explanation of the plan."""
    flags = dataclasses.replace(flags, **changes)
    stages = minutes.fit_minutes(assemble_run(flags), flags, lambda cfg, fill: None)
    return stages, stages[0].title.splitlines()[0]


@pytest.mark.parametrize(
    ("seconds", "size"), [(140, 256), (160, 288), (240, 384), (400, 512), (2000, 672)]
)
def test_the_largest_images_with_enough_epochs_fill_the_time(flags, machine, seconds, size):
    (first, last), summary = fit(flags, minutes=seconds / 60)
    assert first.cfg.SOLVER.EPOCHS == USUAL_FIRST
    left = 0.95 * seconds - FIRST - 2 * PLANNING
    area = (size / 384) ** 2
    expected = min((left - SETUP) / ((STEP + EVALUATION) * area), 3 * USUAL)
    epochs = last.cfg.SOLVER.EPOCHS
    assert epochs == pytest.approx(expected, abs=0.06)
    assert last.cfg.SOLVER.MIN_ITER == 0
    assert max(last.cfg.INPUT.MIN_SIZE_TRAIN) == size
    assert f"--epochs {epochs:g}" in summary
    assert (f"--image-size {size}" in summary) == (size != 384)
    # The first stage may take longer than planned, and the second one has the rest.
    assert first.limit.end == pytest.approx(machine.now + 1.25 * FIRST)
    assert first.limit.max_growth == 1
    assert last.limit.end == pytest.approx(1000 + 0.95 * seconds)
    assert last.limit.max_growth * epochs == pytest.approx(3 * USUAL)
    assert last.limit.needed == pytest.approx(SETUP + USUAL / 3 * (STEP + EVALUATION) * area)


def test_short_of_time_a_run_has_only_its_first_stage(flags, machine):
    (stage,), summary = fit(flags, minutes=50 / 60, batch=4)
    assert stage.cfg.SOLVER.IMS_PER_BATCH == load_config(CACHED).SOLVER.IMS_PER_BATCH
    assert stage.cfg.MODEL.CACHE_FEATURES.ENABLED
    assert len(machine.timed) == 1  # the second stage is not even timed
    assert str(stage.folder) == flags.output
    expected = (0.95 * 50 - SETUP - PLANNING) / (EVALUATION + CACHED_STEP)
    assert stage.cfg.SOLVER.EPOCHS == pytest.approx(expected, abs=0.05)
    warmup = load_config(CACHED).SOLVER.WARMUP_EPOCHS
    assert stage.cfg.SOLVER.WARMUP_EPOCHS == pytest.approx(warmup * expected / 20, abs=0.01)
    assert CACHED in summary
    stop(stage.cfg)
    (resumed,), _ = fit(flags, minutes=50, batch=4, resume=True)
    assert dump_config(resumed.cfg) == dump_config(stage.cfg)
    assert resumed.resume


@pytest.mark.parametrize(("seconds", "views"), [(80, 4), (55, 2), (40, 1), (30, 1)])
def test_short_of_time_fewer_views_are_cached_and_then_fewer_epochs(flags, machine, seconds, views):
    machine.encoding = 40.0
    (stage,), summary = fit(flags, minutes=seconds / 60)
    left = 0.95 * seconds - PLANNING - SETUP - machine.encoding * views / 4
    expected = max(4, left / (EVALUATION + CACHED_STEP))  # 4 epochs are done in any case
    assert stage.cfg.INPUT.FIXED_VIEWS.COUNT == views
    assert stage.cfg.SOLVER.EPOCHS == pytest.approx(expected, abs=0.06)
    assert ("least" in summary) == (expected == 4)
    assert (f"{views} cached view" in summary) == (views != 4)


def test_without_time_to_plan_the_least_is_trained_until_the_time_is_over(flags, monkeypatch):
    monkeypatch.setattr(minutes, "dry_run", lambda cfg, build, num_steps: build(cfg))
    flags = dataclasses.replace(flags, minutes=1)

    def build_slowly(cfg, fill):
        minutes.time.now += 5  # more than 8 % of the minute
        return SimpleNamespace(register_hooks=lambda hooks: None)

    (stage,) = minutes.fit_minutes(assemble_run(flags), flags, build_slowly)
    assert stage.cfg.MODEL.CACHE_FEATURES.ENABLED
    assert stage.cfg.INPUT.FIXED_VIEWS.COUNT == 1
    assert stage.limit.end == 1000 + 0.95 * 60
    assert stage.limit.min_iter == 2


def test_slow_steps_end_with_the_time_for_planning(machine):
    deadline = minutes._Deadline(machine.now + 5)
    deadline.trainer = SimpleNamespace(iter=0, start_iter=0, max_iter=24)
    while deadline.trainer.iter < deadline.trainer.max_iter:
        deadline.before_step()
        machine.now += 2
        deadline.trainer.iter += 1
    assert deadline.trainer.iter == 4  # the step that begins after 6 seconds is the last
    with pytest.raises(UserError, match="--minutes"):
        deadline.refuse_if_over()


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
    ("change", "setup", "named"),
    [
        ({"epochs": 3}, SETUP, "--epochs"),
        ({"minutes": 0.05}, SETUP, "--minutes 0.05"),
        ({"minutes": 1}, 700, "11 min 50 s"),  # ten seconds for 4 epochs
        ({"opts": ["SOLVER.EPOCHS", "0", "SOLVER.MAX_ITER", "5"]}, SETUP, "SOLVER.EPOCHS"),
    ],
)  # fmt: skip
def test_a_plan_that_cannot_be_made_is_a_sentence(flags, machine, change, setup, named):
    machine.setup = setup
    with pytest.raises(UserError) as error:
        fit(flags, **{"minutes": 5, **change})
    assert named in str(error.value)
