# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Looks of a run at itself: when, at which share of its time, and without a trace in the run."""

import json
import logging
import math
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from detectron2.utils.events import EventStorage
from torch import nn

from qbheat_det.engine import looking
from qbheat_det.engine.looking import Look, undisturbed


class Clock:
    """Stands in for the time, which passes when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Watch(Look):
    """Notes the steps at which it looks; a look takes ``seconds``."""

    def __init__(self, *, period: int, share: float, clock: Clock, seconds: float = 0.0) -> None:
        super().__init__(period=period, share=share)
        self.seen: list[int] = []
        self.clock, self.seconds = clock, seconds

    def look(self) -> None:
        self.clock.now += self.seconds
        self.seen.append(self.steps)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(looking, "perf_counter", clock)
    return clock


def make_trainer(folder: Path, max_iter: int) -> Any:
    """A trainer as far as the hook knows one."""
    model = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(2).eval())
    cfg = SimpleNamespace(OUTPUT_DIR=str(folder))
    return SimpleNamespace(
        iter=0, start_iter=0, max_iter=max_iter, cfg=cfg, evaluated_model=model,
        storage=EventStorage(0),
    )  # fmt: skip


def run(hook: Look, trainer: Any, clock: Clock, *, until: int | None = None) -> None:
    """Takes the trainer's steps, of a second each."""
    hook.trainer = trainer
    hook.before_train()
    for iteration in range(trainer.start_iter, until or trainer.max_iter):
        trainer.iter = iteration
        clock.now += 1
        hook.after_step()
    hook.after_train()


@pytest.mark.parametrize(
    ("period", "max_iter", "expected"),
    [
        (3, 8, [0, 3, 6, 8]),
        (4, 8, [0, 4, 8]),
        (100, 8, [0, 8]),
        (0, 100, list(range(0, 101, 5))),
        (0, 7, list(range(8))),
    ],
)
def test_looks_come_before_the_first_step_in_the_period_and_after_the_last(
    tmp_path: Path, clock: Clock, period: int, max_iter: int, expected: list[int]
) -> None:
    hook = Watch(period=period, share=0.01, clock=clock)
    run(hook, make_trainer(tmp_path, max_iter), clock)
    assert hook.seen == expected
    assert (hook.made, hook.left_out) == (len(expected), 0)


def test_looks_that_would_take_more_than_their_share_are_left_out(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    hook = Watch(period=10, share=0.1, clock=clock, seconds=4.0)
    with caplog.at_level(logging.INFO, logger="qbheat_det"):
        run(hook, make_trainer(tmp_path, 200), clock)
    # k looks are done: the next is made where (k + 2) * 4 <= 0.1 * (steps + 4 k).
    assert hook.seen == [0, 120, 160, 190, 200]
    assert hook.made + hook.left_out == 21
    assert "5 made, 16 left out" in caplog.text
    assert f"20.0 seconds, {100 * 20 / 220:.2f} % of the run" in caplog.text


def test_the_last_look_too_stays_within_the_share_of_a_long_run(
    tmp_path: Path, clock: Clock
) -> None:
    hook = Watch(period=1, share=0.01, clock=clock, seconds=0.5)
    run(hook, make_trainer(tmp_path, 1000), clock)
    assert hook.seen[-1] == 1000
    assert 0.5 * hook.made <= 0.01 * (1000 + 0.5 * hook.made)
    assert hook.made > 15


def test_a_resumed_run_looks_at_what_the_whole_run_would_have_looked_at(
    tmp_path: Path, clock: Clock
) -> None:
    settings: dict[str, Any] = {"period": 10, "share": 0.1, "clock": clock, "seconds": 4.0}
    whole, first, second = (Watch(**settings) for _ in range(3))
    run(whole, make_trainer(tmp_path, 200), clock)
    expected = whole.state_dict()
    trainer = make_trainer(tmp_path, 200)
    run(first, trainer, clock, until=130)
    state = first.state_dict()
    clock.now += 1e6  # between the two, which is no time of the run
    trainer.start_iter = 130
    second.load_state_dict(json.loads(json.dumps(state)))
    run(second, trainer, clock)
    assert first.seen + second.seen == whole.seen
    assert second.state_dict() == pytest.approx(expected)


def test_an_error_in_a_look_is_logged_once_and_training_goes_on(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(Watch):
        def look(self) -> None:
            super().look()
            if self.steps in (2, 4):
                raise OSError("no space left on device")

    hook = Broken(period=2, share=1.0, clock=clock)
    trainer = make_trainer(tmp_path, 8)
    with caplog.at_level(logging.INFO, logger="qbheat_det"):
        run(hook, trainer, clock)
    assert hook.seen == [0, 2, 4, 6, 8]
    errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert ["failed after 2 steps" in record.getMessage() for record in errors] == [True]
    assert "5 made, 2 of them with an error" in caplog.text
    assert trainer.evaluated_model.training


def test_a_look_leaves_modes_and_random_generators_as_they_were() -> None:
    model = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(2).eval())

    def draw() -> list[float]:
        return [random.random(), float(np.random.rand()), float(torch.rand(()))]

    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    expected = draw()
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])

    def fail() -> None:
        with undisturbed(model):
            assert [module.training for module in model.modules()] == [False] * 3
            assert not torch.is_grad_enabled()
            draw()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert [module.training for module in model.modules()] == [True, True, False]
    assert torch.is_grad_enabled()
    assert draw() == expected


def test_figures_and_pictures_lie_beside_the_run_and_in_the_storage(tmp_path: Path) -> None:
    picture = np.zeros((4, 6, 3), np.uint8)
    picture[..., 0] = 200  # red

    class Shown(Look):
        def look(self) -> None:
            self.record({"a/b": 2.0, "a/c": math.nan})
            self.show("red", picture)
            self.write_json("figures", {"values": [1, 2]})
            with pytest.raises(ValueError, match="JSON"):
                self.write_json("bad", {"value": math.nan})

    hook, trainer = Shown(period=1, share=1.0), make_trainer(tmp_path, 12)
    hook.trainer, trainer.iter = trainer, 11
    hook.after_step()
    assert hook.failed == 0
    assert sorted(path.name for path in (tmp_path / "looks").iterdir()) == [
        "figures_0000012.json",
        "red_0000012.png",
    ]
    content = json.loads((tmp_path / "looks" / "figures_0000012.json").read_text())
    assert content == {"steps": 12, "values": [1, 2]}
    read = cv2.imread(str(tmp_path / "looks" / "red_0000012.png"))
    np.testing.assert_array_equal(read[..., ::-1], picture)
    assert {name: value for name, (value, _) in trainer.storage.latest().items()} == {"a/b": 2.0}
    assert [(name, image.shape) for name, image, _ in trainer.storage._vis_data] == [
        ("red", (3, 4, 6))
    ]


def test_a_process_that_is_not_the_main_one_does_not_look(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(looking.comm, "is_main_process", lambda: False)
    hook = Watch(period=1, share=1.0, clock=clock)
    run(hook, make_trainer(tmp_path, 3), clock)
    assert hook.seen == []
