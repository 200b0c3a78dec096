# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What a run says of its steps: memory after the first one, and waiting for images."""

import json
import logging
import mmap
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from detectron2.utils.events import EventStorage
from torch import nn

from qbheat_det.engine import memory
from qbheat_det.engine.memory import PeakMemory
from qbheat_det.engine.run_record import write_run_record
from qbheat_det.engine.step_watch import Memory, Waiting, describe_memory, describe_waiting

GIB = 2**30


def take_and_give_back(size: int) -> None:
    """Touches as many bytes of fresh memory; malloc's may be what an earlier test has left."""
    with mmap.mmap(-1, size) as block:
        block.write(b"1" * size)


def test_the_peak_of_a_span_is_what_it_took_and_gave_back() -> None:
    measured = PeakMemory(torch.device("cpu"))
    if measured.before == 0:
        pytest.skip("this system does not tell")
    take_and_give_back(64 * 2**20)
    assert 60 * 2**20 < measured.peak - measured.before < 200 * 2**20
    later = PeakMemory(torch.device("cpu"))
    assert later.peak - later.before < 40 * 2**20  # the peak before is forgotten
    assert later.peak < later.total


def run(hook: Any, steps: int, *, start: int = 0, **trainer: Any) -> EventStorage:
    """Takes a hook through steps, which each say in ``trainer["step"]`` what they do."""
    step = trainer.pop("step")
    with EventStorage(start) as storage:
        hook.trainer = SimpleNamespace(storage=storage, start_iter=start, max_iter=steps, **trainer)
        for hook.trainer.iter in range(start, steps):
            storage.iter = hook.trainer.iter
            hook.before_step()
            step(storage)
            hook.after_step()
    return storage


def test_memory_is_told_after_the_first_step_and_kept_with_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_run_record(tmp_path, command=["train"])
    with caplog.at_level(logging.INFO, logger="qbheat_det"):
        storage = run(
            Memory(period=2),
            4,
            step=lambda _: take_and_give_back(2**26),
            bare_model=nn.Linear(1, 1),
            cfg=SimpleNamespace(OUTPUT_DIR=str(tmp_path)),
        )
    (line,) = [record.getMessage() for record in caplog.records]
    assert "GiB at the peak of the first step" in line
    known = json.loads((tmp_path / "run.json").read_text())[-1]["memory_mib"]
    assert known["peak_of_first_step"] - known["before_first_step"] > 60
    iterations = [iteration for _, iteration in storage.history("peak_memory_mib").values()]
    assert iterations == [0, 1, 3]


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/\n", {"memory.max": "3000\n"}, 3000),  # in a container with a name space
        ("0::/a/b\n", {"a/b/memory.max": "max\n", "a/memory.max": "2000\n"}, 2000),
        ("4:cpu,memory:/a\n2:cpu:/\n0::/\n", {"memory/a/memory.limit_in_bytes": "1000\n"}, 1000),
        ("4:memory:/a\n", {"memory/memory.limit_in_bytes": "1000\n"}, 1000),  # in a container
        ("0::/\n", {"memory.max": "max\n"}, 2**50),
        ("0::/\n", {"memory.max": f"{2**60}\n"}, 2**50),
        (None, {}, 2**50),
    ],
)
def test_there_is_no_more_memory_than_a_container_may_take(
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
    monkeypatch.setattr(memory, "_GROUPS", tmp_path / "groups")
    monkeypatch.setattr(memory, "_GROUP_FOLDERS", tmp_path / "folders")
    pages = {"SC_PAGE_SIZE": 2**12, "SC_PHYS_PAGES": 2**38}
    monkeypatch.setattr(os, "sysconf", pages.__getitem__)
    assert memory.total_memory() == expected


def test_nearly_full_memory_says_what_takes_less() -> None:
    assert describe_memory(GIB, 2 * GIB, 8 * GIB) == (
        "Memory: 2.00 GiB at the peak of the first step, 1.00 GiB before it; there are 8.0 GiB"
    )
    assert "MODEL.ACTIVATION_CHECKPOINTING True" in describe_memory(GIB, 7 * GIB, 8 * GIB)


@pytest.mark.parametrize(("waited", "warns"), [(0.0004, False), (0.005, True)])
def test_a_run_that_waits_is_told_so_once(
    waited: float, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def step(storage: EventStorage) -> None:
        time.sleep(0.01)
        # The first step, in which workers begin, would be nothing but waiting.
        storage.put_scalar("data_time", waited if storage.iter else 10.0)

    with caplog.at_level(logging.WARNING, logger="qbheat_det"):
        storage = run(Waiting(period=12, num_workers=0), 36, step=step)
    assert len(caplog.records) == warns
    assert all("raise DATALOADER.NUM_WORKERS, which is 0" in r.getMessage() for r in caplog.records)
    shares = [share for share, _ in storage.history("data_share").values()]
    assert len(shares) == 3
    assert all(0 < share < 0.6 for share in shares)


def test_where_all_cores_load_images_other_ways_are_named() -> None:
    sentence = describe_waiting(0.2, 1.0, os.cpu_count() or 1)
    assert "wait 20 % of their time for images (0.2 of 1 s)" in sentence
    assert "INPUT.PRETRAIN.MEMORY_GB" in sentence
    assert "raise DATALOADER.NUM_WORKERS" not in sentence
