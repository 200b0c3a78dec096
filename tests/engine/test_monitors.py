# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Monitors of a run's steps: memory, time spent waiting for data, and images left out."""

import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from detectron2.utils import comm
from detectron2.utils.events import EventStorage
from torch import nn

from qbheat_det.data import DataError
from qbheat_det.engine import monitors
from qbheat_det.engine.monitors import (
    SKIPPED_FILE,
    DataTimeMonitor,
    MemoryMonitor,
    SkippedImages,
)

# Frees 64 MiB and prints how much of it the process keeps, in MiB.
_PROGRAM = """
import torch
from torch import nn
from qbheat_det.config import get_cfg
from qbheat_det.engine.block_modes import apply_step_keys
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
cfg = get_cfg()
cfg.SOLVER.KEEP_MEMORY = {kept}
apply_step_keys(cfg, nn.Linear(2, 2))
before = resident()
block = torch.zeros(16 << 20)
del block
print((resident() - before) / 2**20)
"""


def take_steps(hook: Any, steps: int, **trainer: Any) -> EventStorage:
    """Has a hook follow steps of 10 ms, of which the first waits for data throughout."""
    waited = trainer.pop("waited", 0.0)
    with EventStorage(0) as storage:
        hook.trainer = SimpleNamespace(storage=storage, start_iter=0, max_iter=steps, **trainer)
        for hook.trainer.iter in range(steps):
            storage.iter = hook.trainer.iter
            storage.put_scalar("data_time", waited if storage.iter else 10.0)
            if storage.iter:  # Detectron2 leaves out the first steps
                storage.put_scalar("time", 0.01)
            hook.after_step()
    return storage


def test_memory_is_logged_after_the_first_step_and_periodically(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, logger="qbheat_det"):
        storage = take_steps(MemoryMonitor(period=2), 4, bare_model=nn.Linear(1, 1))
    assert len(caplog.records) == 1
    peaks = storage.history("peak_memory_mib").values()
    assert [iteration for _, iteration in peaks] == [0, 1, 3]
    assert all(50 < peak < monitors.total_memory() / 2**20 for peak, _ in peaks)


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/\n", {"memory.max": "3000\n"}, 3000),  # in a container with a name space
        ("0::/a/b\n", {"a/b/memory.max": "max\n", "a/memory.max": "2000\n"}, 2000),
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


@pytest.mark.parametrize(
    ("waited", "workers", "warnings"), [(0.0004, 0, 0), (5e-3, 0, 1), (5e-3, 999, 1)]
)
def test_a_run_that_waits_for_data_is_warned_once(
    waited: float, workers: int, warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="qbheat_det"):
        hook = DataTimeMonitor(period=12, num_workers=workers)
        storage = take_steps(hook, 36, waited=waited)
    assert len(caplog.records) == warnings
    shares = [share for share, _ in storage.history("data_share").values()]
    assert shares == pytest.approx([waited / 0.01] * 3)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
@pytest.mark.parametrize("kept", [True, False])
def test_a_process_keeps_freed_memory_if_the_key_says_so(kept: bool) -> None:
    command = [sys.executable, "-c", _PROGRAM.format(kept=kept)]
    held = float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert (held > 60) is kept


def error(name: str) -> DataError:
    return DataError("unreadable image", f"image '{name}'", "no image at all")


def make_hook(folder: Path, *, period: int = 0, max_iter: int = 1) -> Any:
    """A hook with a trainer as far as it knows one."""
    hook: Any = SkippedImages(period=period)
    hook.trainer = SimpleNamespace(
        iter=0,
        max_iter=max_iter,
        cfg=SimpleNamespace(OUTPUT_DIR=str(folder)),
        data_loader=SimpleNamespace(skipped={}, num_images=1000),
    )
    return hook


def test_new_images_are_named_in_the_period_and_all_at_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hook = make_hook(tmp_path, period=2, max_iter=4)
    named = []
    for hook.trainer.iter, name in enumerate("abca"):
        caplog.clear()
        hook.trainer.data_loader.skipped[f"image '{name}'"] = error(name)
        hook.after_step()
        named.append([name for name in "abc" if f"image '{name}'" in caplog.text])
    assert named == [[], ["a", "b"], [], ["c"]]
    caplog.clear()
    hook.after_train()
    assert "3 of 1,000 images were skipped: image 'a': no image at all; image 'b'" in caplog.text
    lines = (tmp_path / SKIPPED_FILE).read_text().splitlines()
    assert lines == [f"image '{name}': no image at all" for name in "abc"]


def test_the_log_stays_short_and_the_file_has_all_names_also_those_that_are_no_text(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hook = make_hook(tmp_path)
    hook.trainer.data_loader.skipped = {str(i): error(f"{i:04d}") for i in range(299)}
    hook.trainer.data_loader.skipped["a"] = error("a\udcff")
    hook.after_step()
    assert " and 290 more" in caplog.text
    assert "0010" not in caplog.text
    text = (tmp_path / SKIPPED_FILE).read_text()
    assert "udcff" in text
    assert len(text.splitlines()) == 300


def test_what_other_processes_met_is_known_to_all_and_to_a_resumed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook, again = make_hook(tmp_path), make_hook(tmp_path)
    hook.trainer.data_loader.skipped = {"a": error("a")}
    monkeypatch.setattr(comm, "all_gather", lambda met: [met, [error("b")], [error("a")]])
    hook.after_step()
    assert sorted(hook.errors) == ["image 'a'", "image 'b'"]
    again.load_state_dict(hook.state_dict())
    assert again.errors == hook.errors
