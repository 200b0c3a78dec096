# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Where the time of a training step goes, now and before the work on speed.

The jobs are those of ``training_speed``, with the recipes' keys, in float32, each in a process of
its own; the copy of before is the same. A step is profiled several times in turns, and of each kind
of operator the median counts. A profile itself takes some time of every operator, so that many
small ones look longer than they are.

python benchmarks/step_profile.py [--jobs NAME ...] [--rounds N]
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.operators import KINDS, REST
from benchmarks.timing import ROOT, Result, environment, format_results, set_threads, write_results
from benchmarks.training_speed import BEFORE, contender_command, export_tree
from benchmarks.training_worker import OPERATORS, find_jobs
from benchmarks.workers import LeftOut, Worker, started

JOBS = ["qb_heat_285m", "qb_heat_3.7g", "mf_detr_285m_211", "retinanet_285m"]
_ROUNDS = 5


def run(*, quick: bool, threads: int = 2) -> list[Result]:
    """Profiles all jobs; without git or its history it says so and returns nothing.

    Args:
        quick: one job, two images of 64 pixels, one round.
        threads: CPU threads of each process; only one computes at a time.
    """
    jobs, rounds = (JOBS[:1], 1) if quick else (JOBS, _ROUNDS)
    return measure(jobs, rounds=rounds, threads=threads, quick=quick)


def measure(jobs: Sequence[str], *, rounds: int, threads: int, quick: bool = False) -> list[Result]:
    """Profiles steps of the two in turns; a row for each kind of operator of each job.

    Args:
        jobs: names of ``find_jobs``.
        rounds: profiles of each.
        threads: CPU threads of each process.
        quick: two images of 64 pixels.
    """
    rows: list[Result] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            old = export_tree(BEFORE, folder / "before")
        except LeftOut as reason:
            print(f"  nothing to compare with: {reason}")
            return []
        for job in jobs:
            print(f"  {find_jobs()[job].title}", flush=True)
            with ExitStack() as stack:
                workers: dict[str, Worker] = {}
                for title, tree in (("before", old), ("after", ROOT)):
                    place = folder / job / title
                    command = contender_command(
                        tree, job, place, threads=threads, quick=quick, clock=OPERATORS
                    )
                    workers[title], _ = stack.enter_context(started(command))
                rows += rows_of(job, profile_in_turns(workers, rounds=rounds))
    return rows


def profile_in_turns(workers: Mapping[str, Worker], *, rounds: int) -> dict[str, dict[str, float]]:
    """Returns of each worker the median seconds of each kind of operator."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in workers}
    for number in range(-1, rounds):  # the first warms up
        for name, worker in workers.items():
            told = worker(1)["kinds"]
            if number >= 0:
                found[name].append(told)
    return {
        name: {kind: statistics.median(each[kind] for each in told) for kind in (*KINDS, REST)}
        for name, told in found.items()
    }


def rows_of(job: str, seconds: Mapping[str, Mapping[str, float]]) -> list[Result]:
    """Returns a row for each kind in milliseconds, then their sum; ``peer`` is before."""
    after, before = ({**each, "sum": sum(each.values())} for each in
                     (seconds["after"], seconds["before"]))  # fmt: skip
    return [
        Result.lower_is_better(
            f"step_profile/{job}: {kind}", 1e3 * after[kind], 1e3 * before[kind], "ms"
        )
        for kind in after
        if before[kind] and after[kind]
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Profiles with the flags' settings, prints a table and writes it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--jobs", nargs="+", default=JOBS, choices=list(find_jobs()), metavar="NAME"
    )
    parser.add_argument("--rounds", type=int, default=_ROUNDS, help=f"(default: {_ROUNDS})")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: 2)")
    parser.add_argument("--output", type=Path, default=ROOT / "output" / "bench")
    args = parser.parse_args(argv)
    set_threads(args.threads)
    print(environment())
    rows = measure(args.jobs, rounds=args.rounds, threads=args.threads)
    write_results(rows, args.output / "step_profile.json")
    print(format_results(rows))


if __name__ == "__main__":
    main()
