# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What runs print, on terminals and in pipes."""

import json
import logging
import sys
from pathlib import Path

import pytest
from detectron2.utils.events import EventStorage

from qbheat_det.engine import console

from .conftest import TrainAfresh
from .tiny_training import forget_runs


def test_the_terminal_gets_a_summary_and_the_file_everything(
    tmp_path: Path, train_afresh: TrainAfresh, capsys: pytest.CaptureFixture[str]
) -> None:
    train_afresh(tmp_path, {"SOLVER.MAX_ITER": "4", "SOLVER.LOG_PERIOD": "2"})
    printed, log = capsys.readouterr(), (tmp_path / "log.txt").read_text()
    summary = printed.err.splitlines()
    assert len(summary) <= 40
    assert sum("M parameters" in line for line in summary) == 1
    for details in ("BatchNorm2d(", "PIXEL_MEAN", "iter: 3"):
        assert details in log
        assert details not in printed.err
    for line in summary:
        assert line.removeprefix(line[:11]).removeprefix("warning: ") in log
    lines = [json.loads(line) for line in printed.out.splitlines()]  # and nothing else
    assert [line["iteration"] for line in lines if "total_loss" in line] == [1, 3]
    assert lines[-1]["eta_seconds"] == 0


def test_a_second_run_leaves_the_log_of_the_first_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        console.open_log(tmp_path / name)
        logging.getLogger("qbheat_det.engine").info(f"this is the {name}")
        logging.getLogger("detectron2.data").info("hidden")
        logging.getLogger("fvcore.common").warning("shown")
    console.open_log(tmp_path, rank=1)
    logging.getLogger("qbheat_det").warning("of another process")
    forget_runs()
    logs = [(tmp_path / name / "log.txt").read_text() for name in ("first", "second")]
    assert [("first" in log, "second" in log, "hidden" in log) for log in logs] == [
        (True, False, True),
        (False, True, True),
    ]
    assert "of another process" in (tmp_path / "log.txt.rank1").read_text()
    printed = [line.partition("] ")[2] for line in capsys.readouterr().err.splitlines()]
    assert printed == [
        "this is the first",
        "warning: shown",
        "this is the second",
        "warning: shown",
    ]


def test_json_lines_are_valid_and_outlive_their_reader(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    printer = console.JSONPrinter(window_size=2)
    with EventStorage() as storage:
        storage.put_scalars(loss=1 / 3, ap=float("nan"))
        printer.write()
        printer.write()  # nothing is new
        line = capsys.readouterr().out
        assert json.loads(line) == {"iteration": 0, "loss": 0.333333, "ap": None}

        class Closed:
            def write(self, text: str) -> None:
                raise BrokenPipeError

        monkeypatch.setattr(sys, "stdout", Closed())
        storage.step()
        storage.put_scalar("loss", 1.0)
        printer.write()
