# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Where the time of a training step goes, now and before the work on speed.

The jobs and the copy of before are those of ``training_speed``, in float32. A step is profiled
several times in turns, and of each kind of operator the median counts. A profile takes some time of
every operator, so that many small ones look longer than they are.
"""

import re
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.timing import ROOT, Result
from benchmarks.workers import LeftOut, Worker, started

JOBS = ["qb_heat_285m", "qb_heat_3.7g", "mf_detr_285m_211", "retinanet_285m"]
KINDS: dict[str, str] = {
    "convolutions and matrix products": r"conv|aten::(mm|addmm|bmm|baddbmm|linear)$|mkl",
    "attention": r"scaled_dot_product|flash|softmax|_AttendInParts",
    "norms": r"(batch|layer|group)_norm",
    "activations": r"gelu|relu|threshold|hardtanh|clamp|sigmoid|hardsigmoid|_TwoSlopes|tanh",
    "optimizer and clipping": r"^Optimizer|_fused_|_foreach|vector_norm|addcmul_|addcdiv_",
    "dropout's numbers": r"bernoulli|random_|dropout",
    "images": r"DataLoader|upsample_bilinear2d_aa|decode",
}
"""Regular expressions of operators' names, tried in this order."""
REST = "other passes over tensors, and Python"
_ROUNDS = 5


def run(
    *,
    quick: bool,
    threads: int = 2,
    cases: Sequence[str] = JOBS,
    rounds: int = _ROUNDS,
) -> list[Result]:
    """Profiles steps of the two in turns; a row for each kind of operator of each job.

    Args:
        quick: one job, two images of 64 pixels, one round.
        threads: CPU threads of each process; only one computes at a time.
        cases: names of ``find_jobs``.
        rounds: profiles of each.

    Returns:
        Nothing without git or its history.
    """
    from benchmarks.training_speed import BEFORE, contender_command, export_tree
    from benchmarks.training_worker import OPERATORS, find_jobs

    if quick:
        cases, rounds = cases[:1], 1
    rows: list[Result] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            old = export_tree(BEFORE, folder / "before")
        except LeftOut as reason:
            print(f"  nothing to compare with: {reason}")
            return []
        for job in cases:
            print(f"  {find_jobs()[job].title}", flush=True)
            with ExitStack() as stack:
                workers: dict[str, Worker] = {}
                for title, tree in (("before", old), ("after", ROOT)):
                    command = contender_command(
                        tree, job, folder / job / title, threads=threads, quick=quick,
                        clock=OPERATORS,
                    )  # fmt: skip
                    workers[title], _ = stack.enter_context(started(command))
                rows += rows_of(job, profile_in_turns(workers, rounds=rounds))
    return rows


def profile_in_turns(workers: Mapping[str, Worker], *, rounds: int) -> dict[str, dict[str, float]]:
    """Returns of each worker the median seconds of each kind of operator."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in workers}
    for number in range(-1, rounds):  # the first warms up
        for name, worker in workers.items():
            seconds = worker(1)["kinds"]
            if number >= 0:
                found[name].append(seconds)
    return {
        name: {kind: statistics.median(each[kind] for each in taken) for kind in (*KINDS, REST)}
        for name, taken in found.items()
    }


def rows_of(job: str, seconds: Mapping[str, Mapping[str, float]]) -> list[Result]:
    """Returns a row for each kind in milliseconds, then their sum; ``peer`` is before."""
    after, before = (
        {**each, "sum": sum(each.values())} for each in (seconds["after"], seconds["before"])
    )
    return [
        Result.lower_is_better(
            f"step_profile/{job}: {kind}", 1e3 * after[kind], 1e3 * before[kind], "ms"
        )
        for kind in after
        if before[kind] and after[kind]
    ]


def kind_of(name: str) -> str:
    """Returns the kind of an operator, as a profile names it."""
    return next((kind for kind, names in KINDS.items() if re.search(names, name)), REST)


def seconds_by_kind(step: Callable[[], object], steps: int) -> dict[str, float]:
    """Returns the seconds that a step spends in each kind of operator, its callees left out.

    Args:
        step: makes one.
        steps: how many to take the mean of.
    """
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        for _ in range(steps):
            step()
    found = dict.fromkeys([*KINDS, REST], 0.0)
    for event in recorded.key_averages():
        found[kind_of(event.key)] += event.self_cpu_time_total / 1e6 / steps
    return found
