# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Runs the stages of a comparison side by side, each in a process of its own."""

import contextlib
import ctypes
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qbheat_det.core.errors import UserError

from .stage import Key, Stage

if sys.platform != "win32":
    import fcntl

_POLL = 0.2  # seconds
_GRACE = 10.0  # seconds from being asked to end to being ended
_TAIL = 12  # lines of a log
_LOCK = ".running"


@dataclass
class Running:
    """A stage whose process is alive."""

    stage: Stage
    command: list[str]
    process: "subprocess.Popen[bytes]"
    begun: float
    log_start: int


@dataclass
class State:
    """How far a comparison is; what progress and tables are made of.

    Attributes:
        stages: all, in the order of starting.
        results: of those that are done.
        running: those that have a process.
        failed: for each that failed, or cannot be run since another did, why.
    """

    stages: Sequence[Stage]
    results: dict[Key, dict[str, Any]] = field(default_factory=dict)
    running: dict[Key, Running] = field(default_factory=dict)
    failed: dict[Key, str] = field(default_factory=dict)

    @property
    def left(self) -> list[Stage]:
        """Stages that are neither done nor running nor failed."""
        gone = {*self.results, *self.running, *self.failed}
        return [stage for stage in self.stages if stage.key not in gone]


def load_state(stages: Sequence[Stage]) -> State:
    """Returns the stages with those results that stand in their folders and belong to them.

    A result that was made from another result than the one that is there now does not count.

    Raises:
        UserError: a result was made with other settings.
    """
    state = State(stages)
    for stage in stages:  # what a stage needs comes before it
        if (result := _take_over(stage, state)) is not None:
            state.results[stage.key] = result
    return state


def _take_over(stage: Stage, state: State) -> dict[str, Any] | None:
    result = stage.load()
    belongs = result is not None and result.get("made_from") == made_from(stage, state.results)
    return result if belongs else None


def made_from(stage: Stage, results: Mapping[Key, Mapping[str, Any]]) -> dict[str, str] | None:
    """Returns the fingerprints of what a stage needs; None where that is not all done."""
    needed = {name: results.get((stage.objective, stage.seed, name)) for name in stage.needs}
    prints = {name: result["figures"]["fingerprint"] for name, result in needed.items() if result}
    return prints if len(prints) == len(needed) else None


class Runner:
    """Starts what can be started, up to a number of processes, until nothing is left."""

    def __init__(
        self,
        state: State,
        *,
        jobs: int = 1,
        threads: int = 1,
        on_change: Callable[[str], None] = lambda event: None,
        on_poll: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            state: changed in place.
            jobs: processes at once.
            threads: of each, for what PyTorch computes on the CPU.
            on_change: called after a stage began, ended or failed, with a sentence that says so.
            on_poll: called every fraction of a second.
        """
        self.state = state
        self._jobs = jobs
        self._threads = threads
        self._on_change = on_change
        self._on_poll = on_poll

    def run(self) -> None:
        """Runs all that can be run. Whatever ends it, no process is left behind."""
        try:
            while self._start() or self.state.running:
                time.sleep(_POLL)
                self._collect()
                self._on_poll()
        finally:
            stop([running.process for running in self.state.running.values()])
            self.state.running.clear()

    def _start(self) -> bool:
        started = False
        for stage in self.state.left:
            if len(self.state.running) >= self._jobs:
                break
            keys = [(stage.objective, stage.seed, name) for name in stage.needs]
            if broken := [key[2] for key in keys if key in self.state.failed]:
                self._fail(stage, f"needs {' and '.join(broken)}, which failed")
            elif all(key in self.state.results for key in keys):
                # What it needs may have been made again with the same outcome.
                if (result := _take_over(stage, self.state)) is not None:
                    self.state.results[stage.key] = result
                else:
                    self._begin(stage)
                started = True
        return started

    def _begin(self, stage: Stage) -> None:
        command = stage.command()
        stage.folder.mkdir(parents=True, exist_ok=True)
        with open(stage.log_file, "ab") as log:
            log.write(f"\n$ {shlex.join(command)}\n".encode())
            log.flush()
            start = log.tell()
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **_thread_variables(self._threads)},
                start_new_session=True,
                preexec_fn=_end_with_parent if sys.platform == "linux" else None,
            )
        self.state.running[stage.key] = Running(stage, command, process, time.time(), start)
        self._on_change(f"{stage.title}: begun")

    def _collect(self) -> None:
        for key, running in list(self.state.running.items()):
            code = running.process.poll()
            if code is None:
                continue
            del self.state.running[key]
            stage, seconds = running.stage, time.time() - running.begun
            if code != 0:
                self._fail(stage, f"ended with code {code}", tail(stage.log_file, running))
                continue
            try:
                self.state.results[key] = stage.save(
                    command=running.command,
                    seconds=seconds,
                    threads=self._threads,
                    made_from=made_from(stage, self.state.results) or {},
                )
            except (UserError, OSError, ValueError, KeyError, TypeError) as error:
                reason = f"ended well, but {error}"
                self._fail(stage, reason, tail(stage.log_file, running))
            else:
                self._on_change(f"{stage.title}: done in {seconds:.0f} s")

    def _fail(self, stage: Stage, reason: str, log: str = "") -> None:
        self.state.failed[stage.key] = reason
        where = f"; the end of {stage.log_file}:\n{log}" if log else ""
        self._on_change(f"{stage.title}: FAILED, {reason}{where}")


def tail(log_file: Path, running: Running) -> str:
    """Returns the last lines that a process wrote to its log, indented."""
    with open(log_file, "rb") as stream:
        stream.seek(running.log_start)
        text = stream.read().decode(errors="replace")
    # A bar rewrites its line; the last state of it is enough.
    lines = [line.rpartition("\r")[2] for line in text.rstrip().splitlines()]
    return "\n".join(f"    {line}" for line in lines[-_TAIL:])


def stop(processes: Sequence["subprocess.Popen[bytes]"]) -> None:
    """Ends processes with all that they started: asked first, then not."""
    for sign, patience in ((signal.SIGTERM, _GRACE), (signal.SIGKILL, _GRACE)):
        for process in processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, sign)
        end = time.monotonic() + patience
        while any(process.poll() is None for process in processes) and time.monotonic() < end:
            time.sleep(0.05)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keeps other comparisons out of a folder; the system frees it when the process ends.

    Raises:
        UserError: another one is in it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / _LOCK, "ab") as stream:
        if sys.platform != "win32":
            try:
                fcntl.flock(stream.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise UserError(
                    f"another comparison is running in '{folder}': wait for its end, or name "
                    "another --output-dir"
                ) from None
        yield


def share_of_threads(jobs: int) -> int:
    """Returns how many threads each of ``jobs`` processes may use on this machine.

    ``OMP_NUM_THREADS`` in the environment is not exceeded.
    """
    there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    share = max(1, (there or 1) // jobs)
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return min(share, max(1, int(asked))) if asked.isdecimal() else share


def _thread_variables(threads: int) -> dict[str, str]:
    return {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}


_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG = 1


def _end_with_parent() -> None:
    """Has the kernel end this process with the one that started it, were that killed too."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
