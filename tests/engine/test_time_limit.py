# Copyright (c) qbheat_det contributors. Apache-2.0.
"""A run ends in time on a machine that changes, and resumes exactly after its end has moved."""

import math
from types import SimpleNamespace

import pytest
import torch
from detectron2.engine import HookBase

from qbheat_det.core.errors import Interrupted
from qbheat_det.engine import time_limit
from qbheat_det.engine.hooks import EvalHook
from qbheat_det.engine.time_limit import EndInTime, TimeLimit

from . import tiny_training
from .processes import make_args, run_in_processes
from .test_resume import assert_same_bits
from .tiny_training import parse, start_run, state

SECONDS = 100.0
PLANNED = 100  # steps
EVALUATION = 4.0


class Clock:
    now = 0.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(time_limit, "time", clock)
    return clock


def run(clock, step_seconds, *, eval_period=0, limit=None, stop_at=math.inf, state=None):
    """Takes steps of ``step_seconds(iteration)`` each; returns the run and the hook."""
    limit = limit or TimeLimit(end=clock.now + SECONDS, max_growth=3, min_iter=10)
    hook = EndInTime(limit, max_iter=PLANNED, eval_period=eval_period)
    evaluation = SimpleNamespace(seconds=0.0)
    run = SimpleNamespace(iter=0, max_iter=PLANNED, find_hook=lambda kind: evaluation)
    run.move_end = lambda end: setattr(run, "max_iter", end)
    hook.trainer = run
    if state is not None:
        hook.load_state_dict(state["hook"])
        run.iter, run.max_iter = state["iter"], state["max_iter"]
    while run.iter < min(run.max_iter, stop_at):
        clock.now += step_seconds(run.iter)
        hook.after_step()
        evaluation.seconds = 0.0
        is_last = run.iter + 1 >= run.max_iter
        if is_last or (eval_period and (run.iter + 1) % eval_period == 0):
            evaluation.seconds = EVALUATION
            clock.now += EVALUATION
        run.iter += 1
    return run, hook


@pytest.mark.parametrize("eval_period", [0, 10])
@pytest.mark.parametrize(
    "speed",
    [
        lambda iteration: 1.0,
        lambda iteration: 0.4,
        lambda iteration: 3.0,
        lambda iteration: 1.0 if iteration < 50 else 5.0,
        lambda iteration: 5.0 if iteration < 10 else 0.5,
    ],
)
def test_the_run_ends_in_time_also_if_the_machine_changes(clock, speed, eval_period):
    done, _ = run(clock, speed, eval_period=eval_period)
    slowest = speed(done.iter - 1)
    assert clock.now <= SECONDS + EVALUATION + slowest
    assert clock.now >= 0.85 * SECONDS


def test_a_run_is_never_shorter_or_longer_than_its_limits(clock):
    done, _ = run(clock, lambda iteration: 60.0)
    assert done.iter == 10  # the fewest, although there is no time
    clock.now = 0.0
    done, _ = run(clock, lambda iteration: 0.01)
    assert done.iter == 3 * PLANNED


def test_the_time_between_an_interruption_and_the_next_start_does_not_count(clock):
    speed = lambda iteration: 2.0  # noqa: E731
    stopped, hook = run(clock, speed, stop_at=20)
    saved = {"hook": hook.state_dict(), "iter": stopped.iter, "max_iter": stopped.max_iter}
    clock.now += 10_000.0
    begin = clock.now
    resumed, _ = run(clock, speed, state=saved)
    assert clock.now - begin == pytest.approx(SECONDS - 40.0, abs=7.0)
    assert resumed.iter == pytest.approx(50, abs=4)


class Mover(HookBase):
    """Moves the end of a run after an iteration, and asks it to stop after another one."""

    def __init__(self, at, end, stop_at=None):
        self.at, self.end, self.stop_at, self.rates = at, end, stop_at, {}

    def before_step(self):
        self.rates[self.trainer.iter] = self.trainer.optimizer.param_groups[0]["lr"]
        if self.trainer.iter == self.stop_at:
            self.trainer.ask_to_stop()

    def after_step(self):
        if self.trainer.iter == self.at:
            self.trainer.move_end(self.end)


COSINE = {
    "SOLVER.LR_SCHEDULER_NAME": "WarmupCosineLR",
    "SOLVER.WARMUP_ITERS": "0",
    "SOLVER.CHECKPOINT_PERIOD": "100",
}


def train_and_move(folder, data, *flags, **moves):
    trainer = start_run(parse(folder, data, COSINE, *flags))
    mover = Mover(**moves)
    mover.trainer = trainer
    trainer._hooks.insert(2, mover)  # after the scheduler
    trainer.train()
    return mover.rates


@pytest.mark.parametrize("end", [4, 8])
def test_a_run_whose_end_has_moved_resumes_to_the_same_bits(end, tiny_data, tmp_path):
    rates = train_and_move(tmp_path / "whole", tiny_data, at=1, end=end)
    # Two of five steps are done when the end moves: the rest of the cosine has the other steps.
    shares = [0, 0.2] + [0.4 + 0.6 * step / (end - 2) for step in range(end - 2)]
    top = rates[0]
    expected = [top * 0.5 * (1 + math.cos(math.pi * share)) for share in shares]
    assert list(rates.values()) == pytest.approx(expected)

    with pytest.raises(Interrupted, match=f"after 3 of {end} iterations"):
        train_and_move(tmp_path / "stopped", tiny_data, at=1, end=end, stop_at=2)
    later = train_and_move(tmp_path / "stopped", tiny_data, "--resume", at=-1, end=0)
    assert later == {step: rates[step] for step in range(3, end)}
    whole, resumed = state(tmp_path / "whole"), state(tmp_path / "stopped")
    assert whole["trainer"]["iteration"] == end - 1
    assert_same_bits(resumed["model"], whole["model"])


def test_a_user_who_changes_the_length_has_the_last_word(tiny_data, tmp_path):
    with pytest.raises(Interrupted):
        train_and_move(tmp_path, tiny_data, at=1, end=4, stop_at=2)
    opts = {**COSINE, "SOLVER.MAX_ITER": "7"}
    trainer = start_run(parse(tmp_path, tiny_data, opts, "--resume"))
    assert trainer.max_iter == 7
    trainer.train()
    assert state(tmp_path)["trainer"]["iteration"] == 6


def train_without_progress(args):
    """Trains with a patience that ends the run at its second evaluation."""
    torch.manual_seed(0)
    trainer = start_run(args)
    values = iter((5.0, 4.0, 3.0, 2.0, 1.0))
    trainer.evaluate = lambda: {"bbox": {"AP": next(values)}}
    trainer.train()
    return trainer.max_iter, trainer.iter, trainer.find_hook(EvalHook).is_owed


def test_all_processes_stop_early_together(tiny_data, tmp_path):
    opts = {"TEST.EVAL_PERIOD": "1", "TEST.PATIENCE": "0.3", "MODEL.DEVICE": "cpu"}
    args = parse(tmp_path / "run", tiny_data, opts)
    given = make_args(**vars(args))
    ends = run_in_processes(train_without_progress, given, tmp_path)
    assert ends == [(3, 3, False)] * 2
    assert (tmp_path / "run" / "model_final.safetensors").is_file()
    again = tiny_training.train(tmp_path / "run", tiny_data, opts, "--resume")
    assert again == {}  # all is done
