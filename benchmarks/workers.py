# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Worker processes for measurements in turns: each reads a line, works, and answers in JSON.

Contenders do not share imports, allocator settings and compiled code. Only one works at a time.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class LeftOut(Exception):
    """Raised if a contender cannot be measured; the message explains why."""


class Worker:
    """A Python process that answers requests."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def wait(self) -> dict[str, Any]:
        """Returns the next answer; raises ``LeftOut`` if the process has ended or failed."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise LeftOut("its process ended")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise LeftOut(str(answer["error"]).splitlines()[0])
        return answer

    def __call__(self, steps: int = 1) -> dict[str, Any]:
        """Requests ``steps`` steps, and returns the answer; raises like ``wait``."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{steps}\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise LeftOut("its process ended") from error
        return self.wait()

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


@contextmanager
def started(command: Sequence[str]) -> Iterator[tuple[Worker, dict[str, Any]]]:
    """Starts a worker; yields it and its first answer, and ends it on exit."""
    worker = Worker(command)
    try:
        yield worker, worker.wait()
    finally:
        worker.close()


@contextmanager
def said(name: str) -> Iterator[None]:
    """Context that catches ``LeftOut``, and prints why the contender is left out."""
    try:
        yield
    except LeftOut as reason:
        print(f"    {name} is left out: {reason}", flush=True)


def open_answers() -> Callable[[dict[str, Any]], None]:
    """Returns a function that sends answers; redirects other output to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return lambda content: print(json.dumps(content), file=answers, flush=True)


def resident_mib(*, peak: bool) -> float:
    """Returns the current or peak resident memory of this process in MiB (Linux).

    The peak is the kernel's VmHWM, because ``ru_maxrss`` includes the parent process's memory.
    """
    field = "VmHWM:" if peak else "VmRSS:"
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))
