# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Training steps per second, now and before the work on speed, in the same run.

A copy of the package as it was at commit 3039a0f is taken from git's history into a temporary
folder. Every contender is a process of its own that makes steps of the package's trainer, a turn at
a time; the others wait meanwhile, and in every round the order turns round:
  before, after         with the recipe's keys, in float32
  before_channels_last  with MODEL.CHANNELS_LAST, which on a CPU is the default now
  before_bf16,          with SOLVER.AMP in bfloat16 as well; measured where the processor multiplies
  after_bf16            bfloat16
  after_compiled        with SOLVER.COMPILE, if $QBHEAT_BENCH_COMPILED is set: it takes minutes
Forward, backward, optimizer and all that the trainer does count; waiting for images does not. The
images are drawn and the weights random; all begin with the same seed.
"""

import io
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.timing import ROOT, PairedResult, Result, Sample
from benchmarks.training_worker import find_jobs
from benchmarks.workers import LeftOut, said, started
from qbheat_det.core.environment import supports_bfloat16

BEFORE = "3039a0fb1d852814b91589d7e47e3969f3d8f043"
_CHANNELS_LAST = ("MODEL.CHANNELS_LAST", "True")
_BF16 = (*_CHANNELS_LAST, "SOLVER.AMP.ENABLED", "True", "SOLVER.AMP.PRECISION", "bfloat16")
CONTENDERS: dict[str, tuple[bool, tuple[str, ...]]] = {  # whether of the copy, and its keys
    "before": (True, ()),
    "before_channels_last": (True, _CHANNELS_LAST),
    "before_bf16": (True, _BF16),
    "after": (False, ()),
    "after_bf16": (False, _BF16),
    "after_compiled": (False, (*_CHANNELS_LAST, "SOLVER.COMPILE", "True")),
}
PAIRS = [
    ("after", "before"),
    ("after", "before_channels_last"),
    ("after_bf16", "before"),
    ("after_bf16", "before_bf16"),
    ("after_compiled", "before"),
]
_ROUNDS, _WARM_UP = 5, 2
_PROGRAM = str(ROOT / "benchmarks" / "training_worker.py")


@dataclass(frozen=True)
class Turns:
    """What a contender reached.

    Attributes:
        rates: steps per second, of each round.
        first_loss: of its first step.
        peak: MiB of its process, at the end.
    """

    rates: list[float]
    first_loss: float
    peak: float


def run(
    *,
    quick: bool,
    threads: int = 2,
    cases: Sequence[str] = (),
    rounds: int = _ROUNDS,
    clock: str = "wall",
) -> list[Result]:
    """Measures, prints as it goes, and returns a row for each of ``PAIRS`` that was measured.

    Args:
        quick: two jobs as the recipes have them, two images of 64 pixels, one round.
        threads: CPU threads of each process; only one computes at a time.
        cases: names of ``find_jobs``; all by default.
        rounds: timed turns of each.
        clock: "wall", or "cpu" for a machine that is shared.

    Returns:
        Nothing without git or its history.
    """
    jobs, contenders = cases or list(find_jobs()), default_contenders()
    if quick:
        jobs = cases or ["qb_heat_285m", "mf_detr_285m_211"]
        contenders, rounds = ["before", "after"], 1
    rows: list[Result] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            old = export_tree(BEFORE, Path(folder) / "before")
        except LeftOut as reason:
            print(f"  nothing to compare with: {reason}")
            return []
        for job in jobs:
            print(f"  {find_jobs()[job].title}: steps per second, median (least to greatest)")
            with ExitStack() as stack:
                workers: dict[str, Callable[[int], dict[str, Any]]] = {}
                for name in contenders:
                    is_old, opts = CONTENDERS[name]
                    command = contender_command(
                        old if is_old else ROOT,
                        job,
                        Path(folder) / job / name,
                        threads=threads,
                        quick=quick,
                        clock=clock,
                        opts=opts,
                    )
                    with said(name):
                        workers[name], _ = stack.enter_context(started(command))
                turns = take_turns(workers, rounds=rounds, warm_up=1 if quick else _WARM_UP)
            for name, turn in turns.items():
                rates, peak = Sample.of(turn.rates), f"{turn.peak:,.0f} MiB"
                print(f"    {name}: {rates}, first loss {turn.first_loss:.5g}, peak {peak}")
            rows += rows_of(job, turns)
    return rows


def default_contenders() -> list[str]:
    """Returns those that this machine and $QBHEAT_BENCH_COMPILED ask for."""
    left_out = [] if os.environ.get("QBHEAT_BENCH_COMPILED") else ["after_compiled"]
    if not supports_bfloat16(torch.device("cpu")):
        left_out += ["before_bf16", "after_bf16"]
    return [name for name in CONTENDERS if name not in left_out]


def contender_command(
    tree: Path,
    job: str,
    folder: Path,
    *,
    threads: int,
    quick: bool,
    clock: str,
    opts: Sequence[str] = (),
) -> list[str]:
    """Returns the arguments of Python for a process of ``training_worker``, and makes its folder.

    Args:
        tree: folder in which the package lies.
        job: of ``find_jobs``.
        folder: for images and for what the run writes; new.
        threads: CPU threads.
        quick: two images of 64 pixels.
        clock: as the worker takes it.
        opts: keys and values of the config that differ.
    """
    folder.mkdir(parents=True)
    return [_PROGRAM, str(tree), job, str(folder), str(threads), str(int(quick)), clock, *opts]


def export_tree(commit: str, folder: Path) -> Path:
    """Writes the package and its configs, without weights, as they were at a commit.

    Raises:
        LeftOut: there is no git, or its history lacks the commit.
    """
    command = ["git", "archive", commit, "qbheat_det", "configs"]
    command.append(":(exclude)qbheat_det/model_zoo/weights")
    try:
        found = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    except FileNotFoundError as error:
        raise LeftOut("there is no git here") from error
    if found.returncode:
        said = found.stderr.decode(errors="replace").strip().splitlines()
        raise LeftOut(
            f"git has no commit {commit[:7]} ({said[-1] if said else 'no reason given'}): "
            "a clone with its whole history has it"
        )
    with tarfile.open(fileobj=io.BytesIO(found.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder


def take_turns(
    workers: Mapping[str, Callable[[int], dict[str, Any]]],
    *,
    rounds: int,
    warm_up: int = _WARM_UP,
) -> dict[str, Turns]:
    """Lets workers make steps in turns; in every other round the order is the other way round.

    Args:
        workers: make a step and return its ``seconds``, ``loss`` and ``peak``.
        rounds: timed turns of each.
        warm_up: untimed turns of each: the first compiles.
    """
    turns: dict[str, Turns] = {}
    for name, worker in workers.items():
        with said(name):
            first = worker(1)
            for _ in range(warm_up):
                worker(1)
            turns[name] = Turns([], first["loss"], 0.0)
    for number in range(rounds):
        for name in list(turns)[:: 1 if number % 2 else -1]:
            told = workers[name](1)
            turns[name].rates.append(1 / told["seconds"])
            turns[name] = Turns(turns[name].rates, turns[name].first_loss, told["peak"])
    return turns


def rows_of(job: str, turns: Mapping[str, Turns]) -> list[Result]:
    """Returns the rates of each pair that was measured."""
    return [
        PairedResult.higher_is_better(
            f"training_speed/{job}_{ours}_vs_{peer}",
            turns[ours].rates,
            turns[peer].rates,
            "step/s",
        )
        for ours, peer in PAIRS
        if ours in turns and peer in turns
    ]
