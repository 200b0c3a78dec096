# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Monitors of a run's steps: monitors, and time spent waiting for data."""

import json
import logging
import mmap
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from detectron2.utils.events import EventStorage
from torch import nn

from qbheat_det.engine import monitors
from qbheat_det.engine.monitors import DataTimeMonitor, MemoryMonitor
from qbheat_det.engine.run_record import write_run_record

# Frees 64 MiB and prints how much of it the process keeps, in MiB.
_PROGRAM = """
import torch
from torch import nn
from qbheat_det.config import get_cfg
from qbheat_det.engine.monitors import read_bytes, _STATUS
from qbheat_det.engine.block_modes import apply_step_keys
cfg = get_cfg()
cfg.SOLVER.KEEP_MEMORY = {kept}
apply_step_keys(cfg, nn.Linear(2, 2))
before = read_bytes(_STATUS, "VmRSS:")
block = torch.zeros(16 << 20)
del block
print((read_bytes(_STATUS, "VmRSS:") - before) / 2**20)
"""


def touch(size: int) -> None:
    """Uses that many bytes of fresh monitors; malloc's may be left from an earlier test."""
    with mmap.mmap(-1, size) as block:
        block.write(b"1" * size)


def take_steps(hook: Any, steps: int, step: Any, **trainer: Any) -> EventStorage:
    with EventStorage(0) as storage:
        hook.trainer = SimpleNamespace(storage=storage, start_iter=0, max_iter=steps, **trainer)
        for hook.trainer.iter in range(steps):
            storage.iter = hook.trainer.iter
            hook.before_step()
            step(storage)
            hook.after_step()
    return storage


def test_memory_is_logged_after_the_first_step_and_recorded_with_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_run_record(tmp_path, command=["train"])
    with caplog.at_level(logging.INFO, logger="qbheat_det"):
        storage = take_steps(
            MemoryMonitor(period=2),
            4,
            lambda _: touch(2**26),
            bare_model=nn.Linear(1, 1),
            cfg=SimpleNamespace(OUTPUT_DIR=str(tmp_path)),
        )
    assert len(caplog.records) == 1
    known = json.loads((tmp_path / "run.json").read_text())[-1]["memory_mib"]
    assert 60 < known["peak_of_first_step"] - known["before_first_step"] < 200
    iterations = [iteration for _, iteration in storage.history("peak_memory_mib").values()]
    assert iterations == [0, 1, 3]


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/\n", {"monitors.max": "3000\n"}, 3000),  # in a container with a name space
        ("0::/a/b\n", {"a/b/monitors.max": "max\n", "a/monitors.max": "2000\n"}, 2000),
        (None, {}, 2**50),
    ],
)
def test_total_memory_is_that_of_the_container(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    groups: str | None,
    files: dict[str, str],
    expected: int,
) -> None:
    for name, text in files.items():
        path = tmp_path / "folders" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    if groups is not None:
        (tmp_path / "groups").write_text(groups)
    monkeypatch.setattr(monitors, "_GROUP", tmp_path / "groups")
    monkeypatch.setattr(monitors, "_GROUPS_ROOT", tmp_path / "folders")
    pages = {"SC_PAGE_SIZE": 2**12, "SC_PHYS_PAGES": 2**38}
    monkeypatch.setattr(os, "sysconf", pages.__getitem__)
    assert monitors.total_memory() == expected


@pytest.mark.parametrize(("waited", "warnings"), [(0.0004, 0), (0.005, 1)])
def test_a_run_that_waits_for_data_is_warned_once(
    waited: float, warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    def step(storage: EventStorage) -> None:
        time.sleep(0.01)
        # The first step, in which workers start, would be nothing but waiting.
        storage.put_scalar("data_time", waited if storage.iter else 10.0)

    with caplog.at_level(logging.WARNING, logger="qbheat_det"):
        storage = take_steps(DataTimeMonitor(period=12, num_workers=0), 36, step)
    assert len(caplog.records) == warnings
    shares = [share for share, _ in storage.history("data_share").values()]
    assert len(shares) == 3
    assert all(0 < share < 0.6 for share in shares)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
@pytest.mark.parametrize("kept", [True, False])
def test_a_process_keeps_freed_memory_if_the_key_says_so(kept: bool) -> None:
    command = [sys.executable, "-c", _PROGRAM.format(kept=kept)]
    held = float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert (held > 60) is kept
