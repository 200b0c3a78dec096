# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Where the figures of a run go, for runs that begin, go on, or share a folder with another."""

import json
import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from detectron2.config import CfgNode
from detectron2.utils.events import EventStorage, EventWriter

from qbheat_det.config import get_cfg
from qbheat_det.core.errors import UserError
from qbheat_det.engine.writers import WandbWriter, build_writers, drop_metrics_from


class FakeWandb:
    """Remembers what it is told."""

    def __init__(self) -> None:
        self.started: list[dict[str, Any]] = []
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.exit_codes: list[int] = []

    def init(self, **settings: Any) -> Any:
        self.started.append(settings)
        return SimpleNamespace(
            log=lambda scalars, step: self.logged.append((step, scalars)),
            finish=lambda exit_code: self.exit_codes.append(exit_code),
        )


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def make_config(folder: Path, *, project: str = "", epochs: float = 0.0) -> CfgNode:
    cfg = get_cfg()
    cfg.OUTPUT_DIR = str(folder)
    cfg.SOLVER.LOG_PERIOD = 2
    cfg.SOLVER.EPOCHS = epochs
    cfg.SOLVER.WANDB_PROJECT = project
    return cfg


def run(writers: list[EventWriter], *, start: int, end: int) -> None:
    """Does what a trainer does: values at each step, writers every second one and at the end."""
    with EventStorage(start) as storage:
        for iteration in range(start, end):
            storage.iter = iteration
            storage.put_scalar("total_loss", float(iteration))
            storage.put_scalar("time", 1.0)
            if iteration % 2:
                for writer in writers:
                    writer.write()
        storage.iter = end
        for writer in writers:
            writer.write()
            writer.close()


def read_iterations(path: Path) -> list[int]:
    return [json.loads(line)["iteration"] for line in path.read_text().splitlines()]


def test_a_resumed_run_leaves_each_line_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.json"
    run(build_writers(make_config(tmp_path), 10), start=0, end=6)
    writers = build_writers(make_config(tmp_path), 10)
    drop_metrics_from(path, 4)  # after the writers are built, as a trainer does it
    run(writers, start=4, end=10)
    assert read_iterations(path) == [1, 3, 5, 7, 9]


def test_lines_to_be_written_again_are_dropped_and_half_a_line_too(tmp_path: Path) -> None:
    path = tmp_path / "metrics.json"
    path.write_text('{"iteration": 1, "a": NaN}\n{"iteration": 3}\n{"iteration": 5}\n{"iterat')
    drop_metrics_from(path, 5)
    assert path.read_text() == '{"iteration": 1, "a": NaN}\n{"iteration": 3}\n'
    drop_metrics_from(path, 0)
    assert path.read_text() == ""
    drop_metrics_from(tmp_path / "missing.json", 3)
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.json"]


def test_a_new_run_in_an_old_folder_does_not_mix_with_it(tmp_path: Path) -> None:
    for end in (2, 4, 6):
        run(build_writers(make_config(tmp_path), end), start=0, end=end)
    assert read_iterations(tmp_path / "metrics.1.json") == [1]
    assert read_iterations(tmp_path / "metrics.2.json") == [1, 3]
    assert read_iterations(tmp_path / "metrics.json") == [1, 3, 5]


def test_no_file_is_made_before_there_is_something_to_write(tmp_path: Path) -> None:
    writers = build_writers(make_config(tmp_path), 10)
    with EventStorage():
        for writer in writers[1:]:
            writer.write()
            writer.close()
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_hides_the_steps_that_are_made_again(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(build_writers(make_config(tmp_path), 10), start=0, end=6)
    run(build_writers(make_config(tmp_path), 10), start=4, end=10)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [event.step for event in events.Scalars("total_loss")] == [1, 3, 5, 7, 9]


def test_progress_shows_epochs_and_remaining_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="detectron2.utils.events"):
        run(build_writers(make_config(tmp_path, epochs=5.0), 10), start=0, end=6)
    (line, *_) = caplog.messages
    assert line.startswith("epoch: 1.00/5 ")
    assert "eta: 0:00:08" in line
    assert "total_loss: " in line
    lines = [json.loads(line) for line in (tmp_path / "metrics.json").read_text().splitlines()]
    assert [entry["epoch"] for entry in lines if "epoch" in entry] == [1.0, 2.0, 3.0]


def test_the_line_has_losses_of_steps_and_none_of_evaluations(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writers = build_writers(make_config(tmp_path), 4)
    with (
        caplog.at_level(logging.INFO, logger="detectron2.utils.events"),
        EventStorage(0) as storage,
    ):
        for value in (4.0, 2.0, 1.0):
            storage.put_scalars(total_loss=0.5)
            storage.put_scalars(smoothing_hint=False, **{"reconstruction/loss": value})
            for writer in writers:
                writer.write()
            storage.step()
    assert all("total_loss: 0.5" in line for line in caplog.messages)
    assert all("reconstruction" not in line for line in caplog.messages)
    lines = [json.loads(line) for line in (tmp_path / "metrics.json").read_text().splitlines()]
    assert [entry["reconstruction/loss"] for entry in lines] == [4.0, 2.0, 1.0]


def test_wandb_gets_every_scalar_once_and_config_and_name(tmp_path: Path, wandb: FakeWandb) -> None:
    folder = tmp_path / "my_run"
    folder.mkdir()
    run(build_writers(make_config(folder, project="detectors"), 4), start=0, end=4)
    (settings,) = wandb.started
    assert settings["project"] == "detectors"
    assert settings["name"] == "my_run"
    assert settings["config"]["SOLVER"]["WANDB_PROJECT"] == "detectors"
    assert [step for step, _ in wandb.logged] == [1, 3]
    assert wandb.logged[1][1]["total_loss"] == 2.5  # median of two
    assert wandb.exit_codes == [0]


def test_wandb_goes_on_with_the_same_run_and_a_new_run_has_a_new_id(
    tmp_path: Path, wandb: FakeWandb
) -> None:
    cfg = make_config(tmp_path, project="detectors")
    for start, end in ((0, 4), (4, 8), (0, 4)):
        run(build_writers(cfg, 10), start=start, end=end)
    first, resumed, fresh = wandb.started
    assert resumed["id"] == first["id"] != fresh["id"]
    assert (first["resume"], resumed["resume"]) == (None, "allow")


def test_wandb_marks_a_run_that_failed(tmp_path: Path, wandb: FakeWandb) -> None:
    writer = WandbWriter(project="detectors", output_dir=tmp_path, config={})
    try:
        raise ValueError
    except ValueError:
        writer.close()
    assert wandb.exit_codes == [1]


def test_without_wandb_a_sentence_names_the_extra_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    build_writers(make_config(tmp_path), 10)
    with pytest.raises(UserError, match=r"pip install 'qbheat_det\[wandb\]'"):
        build_writers(make_config(tmp_path, project="detectors"), 10)


def test_a_wandb_that_does_not_start_ends_with_a_sentence(
    tmp_path: Path, wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(**_: object) -> None:
        raise RuntimeError("api_key not configured")

    monkeypatch.setattr(wandb, "init", fail)
    with pytest.raises(UserError, match=r"does not start \(api_key not configured\): run 'wandb"):
        WandbWriter(project="detectors", output_dir=tmp_path, config={})
