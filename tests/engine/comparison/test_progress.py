# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Remaining time from what is done, what runs tells of itself, and what is like it."""

import io
import json
import os
import time
from pathlib import Path
from typing import Any, cast

import pytest

from qbheat_det.engine.comparison.progress import (
    Progress,
    describe,
    duration,
    estimate_seconds,
    own_time_left,
    time_left,
)
from qbheat_det.engine.comparison.run import Running, State
from qbheat_det.engine.comparison.stage import Stage


def stage(objective: str, seed: int, name: str, folder: Path, *, tells: bool = False) -> Stage:
    return Stage(
        *(objective, seed, name, folder, lambda: ["true"], dict, {}),
        progress=folder / f"{objective}.jsonl" if tells else None,
    )


def done(seconds: float, of_steps: float = 0.0) -> dict[str, Any]:
    return {"seconds": seconds, "figures": {"seconds": of_steps}}


def running(of: Stage, *, since: float) -> Running:
    return Running(of, ["true"], cast(Any, None), time.time() - since, 0)


def test_a_stage_takes_what_its_other_seeds_took_or_else_other_objectives(tmp_path: Path) -> None:
    stages = [stage(o, s, "pretraining", tmp_path) for o in "abc" for s in (1, 2)]
    state = State(stages)
    assert estimate_seconds(stages[0], state) is None
    state.results[stages[2].key] = done(30.0)
    assert estimate_seconds(stages[0], state) == 30.0
    # Of a run that was continued, the last start is not the whole.
    state.results[stages[1].key] = done(5.0, of_steps=50.0)
    assert estimate_seconds(stages[0], state) == 50.0
    assert estimate_seconds(stages[4], state) == 40.0


def test_work_that_is_left_is_shared_by_jobs(tmp_path: Path) -> None:
    stages = [stage("a", seed, "probes", tmp_path) for seed in range(5)]
    state = State(stages, {stages[0].key: done(100.0)})
    assert time_left(state, 1) == (400.0, 0)
    assert time_left(state, 2) == (200.0, 0)
    other = stage("a", 0, "retinanet", tmp_path)
    assert time_left(State([*stages, other], state.results), 1) == (400.0, 1)


def test_a_running_stage_tells_its_own_time(tmp_path: Path) -> None:
    one = stage("a", 1, "pretraining", tmp_path, tells=True)
    file = tmp_path / "a.jsonl"
    lines = [{"eta_seconds": 90.0, "iteration": 9, "time": 1.0}, {"iteration": 9, "bbox/AP": 1.0}]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"eta_sec')
    item, now = running(one, since=60), time.time()
    os.utime(file, (now - 10, now - 10))
    left = own_time_left(item, now)
    assert left == pytest.approx(80.0, abs=1)
    state = State([one], running={one.key: item})
    assert "a seed 1 pretraining 10 %" in describe(state, 1)
    # What stands there from a start before this one tells nothing of it.
    os.utime(file, (now - 100, now - 100))
    assert own_time_left(item, now) is None


def test_the_line_counts_stages_and_says_what_is_not_known(tmp_path: Path) -> None:
    stages = [stage(o, 1, "probes", tmp_path) for o in "abcd"]
    state = State(stages)
    assert describe(state, 1) == "[0/4 stages done, 4 waiting, time left not known yet]"
    state.results[stages[0].key] = done(100.0)
    state.failed[stages[1].key] = "why"
    state.running[stages[2].key] = running(stages[2], since=40)
    assert describe(state, 1) == (
        "[1/4 stages done, 1 failed, 1 waiting, 3 min left] c seed 1 probes"
    )


def test_lines_are_plain_where_no_terminal_is(tmp_path: Path) -> None:
    state, stream = State([stage("a", 1, "probes", tmp_path)]), io.StringIO()
    progress = Progress(state, jobs=1, stream=stream)
    progress.tell("something happened")
    progress.show()  # too soon after the last
    progress.close()
    assert stream.getvalue() == (
        "something happened\n[0/1 stages done, 1 waiting, time left not known yet]\n"
    )


def test_one_line_is_rewritten_on_a_terminal(tmp_path: Path) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    state, stream = State([stage("a", 1, "probes", tmp_path)]), Terminal()
    progress = Progress(state, jobs=1, stream=stream)
    progress.show(now=True)
    progress.tell("event")
    progress.close()
    text = stream.getvalue()
    assert text.count("\n") == 1
    line = "[0/1 stages done, 1 waiting, time left not known yet]"
    blank = "\r" + " " * len(line) + "\r"
    assert text == f"\r{line}{blank}event\n\r{line}{blank}"


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0.4, "0 s"), (89, "89 s"), (90, "2 min"), (3540, "59 min"), (7500, "2 h 05 min")],
)
def test_times_are_in_the_words_of_a_person(seconds: float, expected: str) -> None:
    assert duration(seconds) == expected
