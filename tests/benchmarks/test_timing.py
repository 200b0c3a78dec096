# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The measuring code: order of calls, statistics, ratios, and files that are never half written."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.timing import (
    ROOT,
    Result,
    Sample,
    peak_memory_in_turns,
    samples_in_rounds,
    write_results,
)


class Clock:
    """A clock that stands still until a call moves it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_calls_take_turns_and_warm_up_is_not_timed() -> None:
    clock, order = Clock(), []

    def call(name: str, seconds: list[float]) -> None:
        order.append(name)
        clock.now += seconds.pop(0)

    ours, peer = [100.0, 1.0, 3.0, 2.0], [200.0, 5.0, 4.0, 9.0]
    samples = samples_in_rounds(
        {"ours": lambda: call("ours", ours), "peer": lambda: call("peer", peer)},
        rounds=3,
        warm_up=1,
        clock=clock,
    )
    assert order == ["ours", "peer"] * 4
    assert samples == {"ours": Sample(2.0, 1.0, 3.0), "peer": Sample(5.0, 4.0, 9.0)}


def test_results_are_written_as_a_list_and_replace_the_old_file_whole(tmp_path: Path) -> None:
    path = tmp_path / "bench" / "latency.json"
    result = Result.lower_is_better("latency/a_vs_b", 0.5, 2.0, "s")
    write_results([result, result], path)
    write_results([result], path)
    row = {"name": "latency/a_vs_b", "ours": 0.5, "peer": 2.0, "unit": "s", "ratio": 4.0}
    assert json.loads(path.read_text()) == [row]
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
def test_the_peak_of_a_process_includes_memory_that_it_has_given_back() -> None:
    # In a process of its own: one that keeps freed memory would take the block out of that.
    program = (
        "import torch\n"
        "from benchmarks.timing import resident_mib\n"
        "before = resident_mib(peak=False)\n"
        "block = torch.ones(64, 1024, 1024, dtype=torch.uint8)\n"
        "del block\n"
        "print(resident_mib(peak=True) - before)"
    )
    command = [sys.executable, "-c", program]
    grown = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert float(grown) >= 60


def test_peak_memory_is_what_each_fresh_process_prints_last() -> None:
    commands = {"ours": ["-c", "print('loading'); print(12.5)"], "peer": ["-c", "print(50)"]}
    samples = peak_memory_in_turns(commands, rounds=2)
    assert samples == {"ours": Sample(12.5, 12.5, 12.5), "peer": Sample(50.0, 50.0, 50.0)}
