# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The measuring code: order of calls, statistics, ratios, and files that are never half written."""

import json
from pathlib import Path

from benchmarks.timing import (
    Result,
    Sample,
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
