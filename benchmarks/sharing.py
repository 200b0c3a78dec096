# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Seconds an image of a small evaluation beside busy processes, and its fair share of the cores.

OpenMP's threads wait asleep, as our commands have it; the peer is what it takes alone, times as
many threads and processes as there are for a core.
"""

import os
import subprocess
import sys

import benchmarks.forms as forms
from benchmarks.timing import Result, Sample
from benchmarks.workers import started

_BUSY = 4  # processes
_SIDE = 128  # pixels


def run(*, quick: bool, threads: int = 2, rounds: int | None = None) -> list[Result]:
    """Times MF-285M + MF-Dec-211 alone, then beside the processes, in turns.

    Args:
        quick: few images.
        threads: CPU threads of the evaluation.
        rounds: turns; by default 8, each of ten images.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    numbers = [str(number) for number in (_SIDE, _SIDE, threads, 1)]
    seconds: dict[int, list[float]] = {0: [], _BUSY: []}
    with started([forms.__file__, "285m_211", forms.EAGER, *numbers]) as (worker, _):
        for _ in range(1 if quick else rounds or 8):
            for count, found in seconds.items():
                busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"])
                        for _ in range(count)]  # fmt: skip
                try:
                    found += [float(worker()["seconds"]) for _ in range(10)]
                finally:
                    for process in busy:
                        process.kill()
                        process.wait()
    alone, beside = (Sample.of(found).median for found in seconds.values())
    share = max(1.0, (threads + _BUSY) / (os.cpu_count() or 1))
    name = "sharing/evaluation_beside_a_busy_core"
    return [Result.lower_is_better(name, beside, alone * share, "s")]
