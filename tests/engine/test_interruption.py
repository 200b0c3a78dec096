# Copyright (c) qbheat_det contributors. Apache-2.0.
"""A run that is told to stop ends after its step, and one that is restarted goes on by itself."""

import json
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from detectron2.utils import comm

from qbheat_det.core.errors import UserError, exit_on_user_error
from qbheat_det.core.termination import Interrupted
from qbheat_det.data import TrainStream
from qbheat_det.engine.hooks import EvalHook
from qbheat_det.engine.run_record import find_start
from qbheat_det.engine.step import StepTrainer

from . import tiny_training
from .processes import make_args, run_in_processes
from .test_resume import assert_same_bits
from .tiny_training import losses, state


def signal_at(iteration, patch, *numbers, rank=0, during="step"):
    """Lets this process signal itself within a step, or within the evaluation after it."""
    owner, name = (StepTrainer, "run_step") if during == "step" else (EvalHook, "_evaluate")
    act = getattr(owner, name)

    def act_and_signal(self):
        if comm.get_rank() == rank and getattr(self, "trainer", self).iter == iteration:
            for number in numbers:
                os.kill(os.getpid(), number)
        act(self)

    patch.setattr(owner, name, act_and_signal)


@pytest.mark.parametrize(
    ("during", "number", "launch"),
    [("step", signal.SIGINT, ""), ("step", signal.SIGTERM, "job"), ("evaluation", 10, "")],
)
def test_a_signal_saves_the_step_and_the_run_goes_on_to_the_same_bits(
    during, number, launch, whole_run, train_afresh, tmp_path, monkeypatch
):
    opts = {"SOLVER.CHECKPOINT_PERIOD": "100", "TEST.EVAL_PERIOD": "3"}
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", launch)
    handler, folder = signal.getsignal(number), tmp_path / "stopped"
    repeated = [number] * (2 if launch else 1)  # torchrun passes on what all have got already
    with monkeypatch.context() as patch:
        signal_at(2, patch, *repeated, during=during)
        with pytest.raises(Interrupted, match="after 3 of 5 iterations: --resume") as stopped:
            train_afresh(folder, opts)
    assert stopped.value.code == 128 + number
    assert signal.getsignal(number) is handler
    assert [path.name for path in folder.glob("*.pth")] == ["model_0000002.pth"]
    train_afresh(folder, opts, "--resume")
    logged = losses(whole_run)
    if during == "evaluation":  # which comes before the log of its step
        logged.pop(2)
    assert losses(folder) == logged
    assert_same_bits(state(folder)["model"], state(whole_run)["model"])


def test_a_signal_ends_a_run_that_gets_no_batch(train_afresh, tmp_path, monkeypatch):
    receive = TrainStream._receive

    def hang(self, batches):
        def wait():
            yield next(batches)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)

        return receive(self, wait())

    monkeypatch.setattr(TrainStream, "_receive", hang)
    start = time.monotonic()
    with pytest.raises(Interrupted, match="SIGTERM while waiting for a batch"):
        train_afresh(tmp_path / "run", {})
    assert time.monotonic() - start < 60
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def test_a_second_interrupt_ends_at_once(train_afresh, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        signal_at(2, patch, signal.SIGINT, signal.SIGINT)
        with pytest.raises(KeyboardInterrupt) as stopped:
            train_afresh(tmp_path / "first", {"SOLVER.CHECKPOINT_PERIOD": "100"})
    assert not isinstance(stopped.value, Interrupted)
    assert not list(tmp_path.glob("first/*.pth"))


@pytest.mark.parametrize("during", ["step", "evaluation"])
def test_an_evaluation_that_a_signal_left_out_is_made_up_for(
    during, whole_run, train_afresh, tmp_path, monkeypatch
):
    folder = tmp_path / "stopped"
    with monkeypatch.context() as patch:
        signal_at(4, patch, signal.SIGINT, during=during)
        with pytest.raises(Interrupted, match="after 5 of 5"):
            train_afresh(folder, {})
    assert (folder / "model_final.safetensors").is_file()
    assert not (folder / "model_best.safetensors").is_file()
    train_afresh(folder, {}, "--resume")
    assert (folder / "model_best.safetensors").is_file()
    found, expected = state(folder), state(whole_run)
    for key in ("model", "trainer"):
        assert_same_bits(found[key], expected[key])
    assert "bbox/AP" in (folder / "metrics.json").read_text()
    evaluated = (folder / "metrics.json").stat()
    train_afresh(folder, {}, "--resume")  # nothing is left to do
    assert (folder / "metrics.json").stat() == evaluated


def test_a_run_that_was_started_again_elsewhere_ends_before_it_saves(
    train_afresh, tmp_path, monkeypatch
):
    record, run_step = tmp_path / "run" / "run.json", StepTrainer.run_step

    def start_again(self):
        record.write_text(json.dumps([{"started": "now"}] * (1 + (self.iter >= 2))))
        run_step(self)

    monkeypatch.setattr(StepTrainer, "run_step", start_again)
    record.parent.mkdir()
    record.write_text('[{"started": "before"}]')
    with pytest.raises(UserError, match=f"{record}.*at now"):
        train_afresh(record.parent, {"SOLVER.CHECKPOINT_PERIOD": "2"})
    assert [path.name for path in record.parent.glob("*.pth")] == ["model_0000001.pth"]


def train_and_report(args):
    """The job of one of two processes, of which only the second is signalled."""
    patch = pytest.MonkeyPatch()
    signal_at(2, patch, signal.SIGTERM, rank=1)
    try:
        tiny_training.train(Path(args.output), Path(args.data), {"SOLVER.CHECKPOINT_PERIOD": "100"})
    except Interrupted as stop:
        return str(stop)
    finally:
        patch.undo()
    return ""


@pytest.mark.slow
def test_processes_end_after_the_same_step(tiny_data, tmp_path):
    args = make_args(output=str(tmp_path / "run"), data=str(tiny_data))
    said = run_in_processes(train_and_report, args, tmp_path)
    assert all("SIGTERM after 3 of 5" in words for words in said)
    assert [path.name for path in tmp_path.glob("run/*.pth")] == ["model_0000002.pth"]


def train_in_own_session(folder, data, opts):
    os.setsid()
    sys.stderr = (Path(folder).parent / "stderr.txt").open("w")
    exit_on_user_error(tiny_training.train)(Path(folder), Path(data), opts, "--resume")


@pytest.mark.slow
def test_signals_to_a_process_and_its_workers_lose_no_step(tiny_data, tmp_path):
    opts = {"SOLVER.MAX_ITER": "60", "SOLVER.CHECKPOINT_PERIOD": "100"}
    context = multiprocessing.get_context("forkserver")

    def start(folder, **more):
        words = (str(folder), str(tiny_data), {**opts, **more})
        process = context.Process(target=train_in_own_session, args=words)
        process.start()
        return process

    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    start(whole).join()
    for number, workers in ((signal.SIGINT, "0"), (signal.SIGTERM, "2"), (signal.SIGUSR1, "1")):
        process = start(stopped, **{"DATALOADER.NUM_WORKERS": workers})
        before = len(losses(stopped)) if stopped.exists() else 0
        while process.is_alive() and not (
            (stopped / "metrics.json").exists() and len(losses(stopped)) > before + 2
        ):
            time.sleep(0.01)
        began = time.monotonic()
        os.killpg(process.pid or 0, number)
        process.join(30)
        assert process.exitcode == 128 + number
        assert time.monotonic() - began < 30
        text = (tmp_path / "stderr.txt").read_text()
        assert f"stopped by {signal.Signals(number).name} after " in text
    start(stopped).join()
    assert losses(stopped) == losses(whole)
    assert_same_bits(state(stopped)["model"], state(whole)["model"])


@pytest.mark.parametrize(
    ("began", "launch", "checkpoint", "flag", "expected"),
    [
        ("job", "job", True, False, True),
        ("job", "job", False, False, False),  # it ended before its first checkpoint
        ("job", "earlier", True, False, False),  # only the last start counts
        ("none", "none", True, False, False),  # torchrun's default for every run
        ("", "", True, False, False),
        ("", "job", True, True, True),
        ("job", "job", False, True, True),
    ],
)
def test_a_run_continues_by_itself_under_the_launch_that_began_it(
    began, launch, checkpoint, flag, expected, tmp_path, monkeypatch
):
    starts = [{"launch": "earlier"}, {"launch": began if began != "none" else ""}]
    (tmp_path / "run.json").write_text(json.dumps(starts))
    if checkpoint:
        (tmp_path / "last_checkpoint").write_text("model_0000001.pth")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", launch)
    assert find_start(tmp_path, asked=flag).resume == expected
    if not (checkpoint and expected):
        return
    monkeypatch.setattr(comm, "all_gather", lambda own: [own, ("", False)])
    with pytest.raises(UserError, match=str(tmp_path)):
        find_start(tmp_path, asked=flag)
