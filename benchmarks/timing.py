# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Measures calls in turns, and the peak memory of new processes; defines the result format."""

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from qbheat_det.core.files import write_atomically

ROOT = Path(__file__).resolve().parents[1]
OUTPUT = ROOT / "output" / "bench"
ENVIRONMENTS = "environments.json"
Clock = Callable[[], float]


@dataclass(frozen=True)
class Sample:
    """Median, minimum and maximum of repeated measurements."""

    median: float
    least: float
    greatest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Sample":
        return cls(statistics.median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{self.median:.3g} ({self.least:.3g} to {self.greatest:.3g})"


@dataclass(frozen=True)
class Result:
    """One row of ``output/bench/*.json``; the ratio is above 1 if ours is better."""

    name: str
    ours: float
    peer: float
    unit: str
    ratio: float

    @classmethod
    def lower_is_better(cls, name: str, ours: float, peer: float, unit: str) -> "Result":
        return cls(name, ours, peer, unit, peer / ours)


@dataclass(frozen=True)
class PairedResult(Result):
    """A row with the median, minimum and maximum of the ratios in all rounds."""

    ratio_least: float
    ratio_greatest: float

    @classmethod
    def higher_is_better(
        cls, name: str, ours: Sequence[float], peer: Sequence[float], unit: str
    ) -> "PairedResult":
        """Takes the measurements of ours and the peer in each round."""
        ratios = Sample.of([a / b for a, b in zip(ours, peer, strict=True)])
        medians = statistics.median(ours), statistics.median(peer)
        return cls(name, *medians, unit, ratios.median, ratios.least, ratios.greatest)


def seconds_in_rounds(
    calls: Mapping[str, Callable[[], Any]],
    *,
    rounds: int,
    warm_up: int = 1,
    clock: Clock | None = time.perf_counter,
) -> dict[str, list[float]]:
    """Times calls in turns (A B A B), so that slow phases of the machine affect all of them.

    If ``clock`` is None, the calls return their duration themselves, as in other processes. Returns
    the seconds in each round by name.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(warm_up + rounds):
        for name, call in calls.items():
            if clock is None:
                duration = call()
            else:
                start = clock()
                call()
                duration = clock() - start
            if number >= warm_up:
                seconds[name].append(duration)
    return seconds


def samples_in_rounds(calls: Mapping[str, Callable[[], Any]], **settings: Any) -> dict[str, Sample]:
    """Like ``seconds_in_rounds``, but returns a ``Sample`` of the seconds by name."""
    return {name: Sample.of(taken) for name, taken in seconds_in_rounds(calls, **settings).items()}


def peak_memory_in_turns(
    commands: Mapping[str, Sequence[str]], *, rounds: int, timeout: float = 600
) -> dict[str, Sample]:
    """Runs Python commands in turns; each must print its peak memory in MiB at the end."""
    peaks: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(rounds):
        for name, command in commands.items():
            output = subprocess.run(
                [sys.executable, *command],
                check=True,
                cwd=ROOT,
                timeout=timeout,
                stdout=subprocess.PIPE,
                text=True,
            ).stdout
            peaks[name].append(float(output.split()[-1]))
    return {name: Sample.of(values) for name, values in peaks.items()}


def set_threads(threads: int) -> None:
    """Sets the number of CPU threads that operators use in this process."""
    torch.set_num_threads(threads)


def environment() -> str:
    """Returns one line about the CPU, versions, threads and the load of the machine."""
    name = platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if "model name" in line:
                name = " ".join(line.split(":", 1)[1].split())
                break
    return (
        f"{name}, {os.cpu_count()} cores; "
        f"Python {platform.python_version()}, "
        f"torch {torch.__version__}, {torch.get_num_threads()} threads; "
        f"load average before the run {os.getloadavg()[0]:.2f}"
    )


def write_results(results: Sequence[Result], path: Path) -> None:
    """Writes the rows as a JSON list."""
    write_json(path, [asdict(result) for result in results])


def write_environment(name: str, path: Path) -> None:
    """Adds to a JSON file a line about the machine on which a benchmark was measured."""
    try:
        lines = dict(json.loads(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError, TypeError):
        lines = {}
    write_json(path, {**lines, name: environment()})


def write_json(path: Path, content: Any) -> None:
    """Writes JSON. Raises a ``ValueError`` if a number is not finite."""
    text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    write_atomically(path, text.encode())


def format_results(results: Sequence[Result]) -> str:
    """Returns the rows as an aligned table."""
    width = max([len("name"), *(len(result.name) for result in results)])
    lines = [f"{'name':<{width}}  {'ours':>9}  {'peer':>9}  {'unit':<7}  ratio"]
    lines += [
        f"{r.name:<{width}}  {r.ours:>9.4g}  {r.peer:>9.4g}  {r.unit:<7}  {r.ratio:.2f}"
        for r in results
    ]
    return "\n".join(lines)
