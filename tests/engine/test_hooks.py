# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Hooks of a run that is only pretended: evaluation, the best weights, checkpoints, images."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from detectron2.utils import comm
from detectron2.utils.events import EventStorage

from qbheat_det.core.errors import UserError
from qbheat_det.data import DataError
from qbheat_det.engine import hooks
from qbheat_det.engine.hooks import (
    SKIPPED_FILE,
    EvalHook,
    PeriodicCheckpointer,
    SkippedImages,
    TrainingRun,
)
from qbheat_det.engine.mean_teacher import SemiSupervisedEvalHook


class PretendedRun:
    """A ``TrainingRun`` that records what hooks ask of it.

    Attributes:
        exported: iteration of each file of weights, by name.
    """

    def __init__(self, folder, *, max_iter=4, results=None):
        self.cfg = SimpleNamespace(
            OUTPUT_DIR=str(folder), DATASETS=SimpleNamespace(TEST=("any",) if results else ())
        )
        self.iter, self.start_iter, self.max_iter, self.stops = 0, 0, max_iter, False
        self.storage = EventStorage(0)
        self.results = iter(results or [])
        self.exported = {}

    def move_end(self, max_iter):
        self.max_iter = max_iter

    def evaluate(self):
        results = next(self.results)
        if isinstance(results, Exception):
            raise results
        return results

    def save(self, name):
        (Path(self.cfg.OUTPUT_DIR) / f"{name}.pth").write_text(str(self.iter))

    def export(self, name):
        self.exported[name] = self.iter

    def take_steps(self, *hooks, start=0, end=None):
        for hook in hooks:
            hook.trainer = self
        self.iter = start
        while self.iter < min(self.max_iter, end or self.max_iter):
            self.storage.iter = self.iter
            for hook in hooks:
                hook.after_step()
            self.iter += 1


def aps(*values):
    return [{"bbox": {"AP": value, "AP-ring": math.nan}} for value in values]


def checkpoints(folder):
    """Iterations of the periodic checkpoints."""
    return sorted(int(path.stem[6:]) for path in folder.glob("model_0*.pth"))


def test_memory_goes_back_when_more_is_kept_than_after_the_first_twenty_steps(monkeypatch):
    returned = []
    trainer = SimpleNamespace(iter=0, start_iter=0)
    monkeypatch.setattr(hooks, "return_freed_memory", lambda: returned.append(trainer.iter + 1))
    pages = {20: 1000, 40: 1010, 60: 1100, 80: 900, 100: 1000}
    monkeypatch.setattr(Path, "read_text", lambda _: f"0 {pages[trainer.iter + 1]} 0")
    hook = hooks.KeptMemory()
    hook.trainer = cast(TrainingRun, trainer)
    for trainer.iter in range(100):
        hook.after_step()
    assert returned == [60, 100]


def test_the_best_weights_are_kept_and_a_nan_is_never_the_best(tmp_path):
    run = PretendedRun(tmp_path, results=aps(math.nan, 7.0, 5.0, 7.0))
    hook = EvalHook(period=1, best_metric="bbox/AP")
    run.take_steps(hook)
    assert run.exported == {"model_best": 1}
    assert hook.best == {"value": 7.0, "iteration": 1}
    assert [value for value, _ in run.storage.history("bbox/AP").values()] == [7, 5, 7]
    assert "bbox/AP-ring" not in run.storage.histories()  # nan is no JSON

    results = [{"task": {"loss_all": value}} for value in (3.0, 1.0, 2.0, 5.0)]
    for metric, exported in (("task/loss_all", {"model_best": 1}), ("segm/AP", {})):
        run = PretendedRun(tmp_path, results=results)
        run.take_steps(EvalHook(period=1, best_metric=metric))
        assert run.exported == exported


@pytest.mark.parametrize(
    ("patience", "values", "num_done"),
    [
        (0.4, (5, 4, 4, 4, 4, 4), 5),  # 4 of 10 iterations after the best one, the first
        (0.4, (5, 4, 6, 4, 4, 4, 4), 7),
        (0.4, (math.nan, 5, 4, 4, 4, 4), 6),  # there is no best one before
        (0.4, range(10), 10),
        (0.0, range(10, 0, -1), 10),
    ],
)
def test_a_run_that_gets_no_better_ends_early(tmp_path, patience, values, num_done):
    run = PretendedRun(tmp_path, max_iter=10, results=aps(*values))
    first = EvalHook(period=1, best_metric="bbox/AP", patience=patience)
    saver = PeriodicCheckpointer(period=0, kept=0)
    run.take_steps(first, saver, end=3)
    second = EvalHook(period=1, best_metric="bbox/AP", patience=patience)
    second.load_state_dict(first.state_dict())  # a resumed run waits as long
    run.take_steps(second, saver, start=3)
    assert run.max_iter == num_done
    assert run.exported["model_final"] == num_done - 1
    assert (tmp_path / "model_final.pth").read_text() == str(num_done - 1)


def test_the_patience_with_unlabelled_images_begins_after_the_burn_in(tmp_path):
    run = PretendedRun(tmp_path, max_iter=10, results=aps(*range(10, 0, -1)))
    hook = SemiSupervisedEvalHook(burn_in=5, period=1, best_metric="bbox/AP", patience=0.3)
    run.take_steps(hook)
    assert run.max_iter == 5 + 3


def test_a_resumed_run_remembers_the_best_and_another_metric_starts_anew(tmp_path):
    run = PretendedRun(tmp_path, results=aps(9.0, 1.0, 8.0, 3.0))
    first = EvalHook(period=1, best_metric="bbox/AP")
    run.take_steps(first, end=2)
    second = EvalHook(period=1, best_metric="bbox/AP")
    second.load_state_dict(first.state_dict())
    run.take_steps(second, start=2)
    assert run.exported == {"model_best": 0}
    other = EvalHook(period=1, best_metric="segm/AP")
    other.load_state_dict(first.state_dict())
    assert other.best == {}


def test_an_evaluation_that_fails_does_not_lose_the_training(tmp_path):
    for period, expected in ((3, ["model_0000002"]), (0, ["model_0000002", "model_final"])):
        run = PretendedRun(tmp_path, results=[UserError("image 'x'")])
        with pytest.raises(UserError, match="image 'x'"):
            run.take_steps(EvalHook(period=period, best_metric="bbox/AP"))
        assert sorted(path.stem for path in tmp_path.iterdir()) == expected


@pytest.mark.parametrize(("kept", "expected"), [(0, [0, 1, 2]), (2, [1, 2])])
def test_the_newest_checkpoints_stay(tmp_path, kept, expected):
    run = PretendedRun(tmp_path)
    run.take_steps(PeriodicCheckpointer(period=1, kept=kept))
    assert checkpoints(tmp_path) == expected
    assert (tmp_path / "model_final.pth").read_text() == "3"
    assert run.exported == {"model_final": 3}


def test_checkpoints_from_before_a_resumption_further_back_are_removed(tmp_path):
    for iteration in range(4):
        (tmp_path / f"model_{iteration:07d}.pth").write_text("old")
    hook = PeriodicCheckpointer(period=1, kept=1)
    PretendedRun(tmp_path, max_iter=9).take_steps(hook, start=1, end=2)
    assert checkpoints(tmp_path) == [1]
    assert (tmp_path / "model_0000001.pth").read_text() == "1"


def error(name):
    return DataError("unreadable image", f"image '{name}'", "no image at all")


def test_skipped_images_of_all_processes_are_named_once_and_known_to_a_resumed_run(
    tmp_path, monkeypatch, caplog
):
    hook, again = SkippedImages(period=2), SkippedImages(period=2)
    run = PretendedRun(tmp_path)
    run.data_loader = SimpleNamespace(skipped={}, num_files=1000)
    monkeypatch.setattr(comm, "all_gather", lambda met: [met, [error("b"), error("a")]])
    named = []
    for iteration, name in enumerate(["a", "a", "a", "c\udcff"]):
        caplog.clear()
        run.data_loader.skipped[f"image '{name}'"] = error(name)
        run.take_steps(hook, start=iteration, end=iteration + 1)
        named.append([name for name in "abc" if f"image '{name}" in caplog.text])
    assert named == [[], ["a", "b"], [], ["c"]]
    assert "3 of 1,000 images" in caplog.text
    lines = (tmp_path / SKIPPED_FILE).read_text().splitlines()
    assert lines[:2] == [f"image '{name}': no image at all" for name in "ab"]
    assert "udcff" in lines[2]
    again.load_state_dict(hook.state_dict())
    assert again.errors == hook.errors
    assert len(hook.errors) == 3
