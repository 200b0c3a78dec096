# Copyright (c) qbheat_det contributors. Apache-2.0.
"""How far a whole comparison is, and how long it will take."""

import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from .run import Running, State
from .stage import Key, Stage

_PERIOD = 0.5  # seconds between two states of the line on a terminal
_PLAIN_PERIOD = 120.0  # and between two lines elsewhere
_CHUNK = 4096


class Progress:
    """One line that is rewritten on a terminal; elsewhere a line now and then."""

    def __init__(self, state: State, *, jobs: int, stream: TextIO | None = None) -> None:
        self._state = state
        self._jobs = jobs
        self._stream = stream or sys.stderr
        self._on_terminal = self._stream.isatty()
        self._said = 0.0
        self._width = 0

    def tell(self, event: str) -> None:
        """Prints what happened, and the state after it."""
        self._clear()
        print(event, file=self._stream, flush=True)
        self.show(now=True)

    def show(self, *, now: bool = False) -> None:
        """Prints the state, if the last time is long ago."""
        period = _PERIOD if self._on_terminal else _PLAIN_PERIOD
        if not now and time.monotonic() - self._said < period:
            return
        self._said = time.monotonic()
        line = describe(self._state, self._jobs)
        if self._on_terminal:
            line = line[: _columns(self._stream) - 1]
            print("\r" + line.ljust(self._width), end="", file=self._stream, flush=True)
            self._width = len(line)
        else:
            print(line, file=self._stream, flush=True)

    def close(self) -> None:
        """Ends the line on a terminal."""
        self._clear()

    def _clear(self) -> None:
        if self._on_terminal and self._width:
            print("\r" + " " * self._width + "\r", end="", file=self._stream, flush=True)
            self._width = 0


def describe(state: State, jobs: int) -> str:
    """Returns the state of all stages in one line."""
    running = [f"{item.stage.title}{_share(item)}" for item in state.running.values()]
    total = len(state.stages)
    parts = [f"{len(state.results)}/{total} stages done"]
    if state.failed:
        parts.append(f"{len(state.failed)} failed")
    parts.append(f"{len(state.left)} waiting")
    seconds, unknown = time_left(state, jobs)
    if state.left or state.running:
        least = "at least " if unknown else ""
        known = seconds or not unknown
        parts.append(f"{least}{duration(seconds)} left" if known else "time left not known yet")
    return f"[{', '.join(parts)}] {'; '.join(running)}".rstrip()


def time_left(state: State, jobs: int) -> tuple[float, int]:
    """Returns the seconds that are left, and how many stages are not in them.

    What runs tells its own remaining time, or is taken to be as long as others of its name; what
    has not begun is as long as that of other seeds, or else of other objectives. Stages of which
    none has come to its end yet are not known.
    """
    now, unknown, work, longest = time.time(), 0, 0.0, 0.0
    for item in state.running.values():
        left = own_time_left(item, now)
        if left is None:
            estimate = estimate_seconds(item.stage, state)
            left = None if estimate is None else max(0.0, estimate - (now - item.begun))
        unknown += left is None
        work += left or 0.0
        longest = max(longest, left or 0.0)
    for stage in state.left:
        estimate = estimate_seconds(stage, state)
        unknown += estimate is None
        work += estimate or 0.0
    return max(work / jobs, longest), unknown


def estimate_seconds(stage: Stage, state: State) -> float | None:
    """Returns what a stage takes, None if that is not known.

    By the same of other seeds that is done or tells, or else by the steps that it made before it
    was stopped, or else by that of other objectives.
    """
    own = _own_seconds(stage, state)
    known = [own] if own is not None else list(_known_seconds(state, "", stage.name))
    return statistics.fmean(known) if known else None


def is_known(stage: Stage, state: State) -> bool:
    """Whether runs of the stage's own objective tell what it takes."""
    return _own_seconds(stage, state) is not None


def _own_seconds(stage: Stage, state: State) -> float | None:
    if known := list(_known_seconds(state, stage.objective, stage.name)):
        return statistics.fmean(known)
    record = last_record(stage.progress)
    if record is not None and stage.steps and "time" in record[0]:
        return float(record[0]["time"]) * stage.steps
    return None


def _known_seconds(state: State, objective: str, name: str) -> Iterator[float]:
    """Yields the seconds of stages of a name, of one objective or, with "", of all."""
    now = time.time()

    def fits(key: Key) -> bool:
        return key[2] == name and objective in ("", key[0])

    for key, result in state.results.items():
        if fits(key):
            yield whole_seconds(key, result)
    for key, item in state.running.items():
        if fits(key) and (left := own_time_left(item, now)) is not None:
            yield now - item.begun + left


def whole_seconds(key: Key, result: Mapping[str, Any]) -> float:
    """Returns what a finished stage took, also where its last start had little left to do."""
    return max(float(result["seconds"]), float(result["figures"].get("seconds") or 0.0))


def own_time_left(running: Running, now: float) -> float | None:
    """Returns the seconds that a running stage says it needs; None where it says nothing."""
    record = last_record(running.stage.progress)
    if record is None or record[1] < running.begun:  # of an earlier start
        return None
    eta = record[0].get("eta_seconds")
    return None if eta is None else max(0.0, float(eta) - (now - record[1]))


def last_record(path: Path | None) -> tuple[dict[str, Any], float] | None:
    """Returns the last whole line of a file of JSON lines that holds the time left, and when."""
    if path is None or not path.is_file():
        return None
    with open(path, "rb") as stream:
        stream.seek(0, 2)
        stream.seek(max(0, stream.tell() - _CHUNK))
        lines = stream.read().decode(errors="replace").splitlines()
    for line in reversed(lines):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and "eta_seconds" in record:
            return record, path.stat().st_mtime
    return None


def duration(seconds: float) -> str:
    """Returns a length of time in the words of a person, such as "1 h 05 min"."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 60 else f"{minutes} min"


def _share(running: Running) -> str:
    record = last_record(running.stage.progress)
    if record is None or not {"iteration", "time"} <= record[0].keys():
        return ""
    done, step = record[0]["iteration"] + 1, max(record[0]["time"], 1e-9)
    return f" {100 * done / (done + record[0]['eta_seconds'] / step):.0f} %"


def _columns(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        return 80
