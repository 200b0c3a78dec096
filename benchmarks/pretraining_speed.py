# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Pre-training of MF-285M at 128 pixels: the CPU recipe beside its past, a teacher's features.

The recipe is compared with the copy of ``training_speed``: 16 images a step, without waiting for
images, with the threads that are asked for and with one. On a teacher's cached features, by
quarters, a step has 64 images and one thread; loading counts, and the peer is the same with the
decoder to pixels.
"""

import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from benchmarks.timing import ROOT, PairedResult, Result, set_threads
from benchmarks.training_speed import BEFORE, contender_command, export_tree, take_turns
from benchmarks.workers import LeftOut, said, started
from qbheat_det.core.environment import supports_bfloat16

_JOB = "qb_heat_285m_128px"
_BF16 = ("SOLVER.AMP.ENABLED", "True", "SOLVER.AMP.PRECISION", "bfloat16")
_BATCH = ("SOLVER.IMS_PER_BATCH", "64", "SOLVER.REFERENCE_BATCH_SIZE", "64")
_QUICK = ("MODEL.TEACHER.IMAGE_SIZE", "128")  # of images of 64 pixels
_FEATURES = ("MODEL.META_ARCHITECTURE", "FeatureDistillation", "MODEL.QB_HEAT.FEATURE_DIM", "384")


def run(*, quick: bool, threads: int = 2, rounds: int = 5) -> list[Result]:
    """Measures all contenders in turns.

    Args:
        quick: two images of 64 pixels, one round, one thread.
        threads: CPU threads of the recipe's first row.
        rounds: timed turns of each.

    Returns:
        Rows of steps or images a second; those beside the past are left out without git's history.
    """
    set_threads(threads)
    precisions = {"": (), "_bf16": _BF16} if supports_bfloat16(torch.device("cpu")) else {"": ()}
    rows: list[Result] = []
    with tempfile.TemporaryDirectory() as name:
        folder, batch = Path(name), _QUICK if quick else _BATCH
        with said("before"):
            old = export_tree(BEFORE, folder / "tree")
            for count in [1] if quick else sorted({threads, 1}, reverse=True):
                trees = {"before": (old, ()), **{e: (ROOT, o) for e, o in precisions.items()}}
                rates = _measure(trees, folder / str(count), count, quick, rounds)
                prefix = f"qb_heat_128{'' if count == threads else '_one_thread'}"
                rows += _rows(rates, prefix, "_vs_3039a0f", "before", "step/s")
        features = {end: (ROOT, (*batch, *_FEATURES, *opts)) for end, opts in precisions.items()}
        features["pixels"] = ROOT, batch
        rates = _measure(features, folder / "features", 1, quick, rounds, loading=True)
        images = {key: [(2 if quick else 64) * rate for rate in rates[key]] for key in rates}
        rows += _rows(images, "feature_target", "_images_per_second", "pixels", "img/s")
    return rows


def _measure(
    contenders: Mapping[str, tuple[Path, tuple[str, ...]]],
    folder: Path,
    threads: int,
    quick: bool,
    rounds: int,
    *,
    loading: bool = False,
) -> dict[str, list[float]]:
    """Returns steps a second in each round; ``contenders`` are trees and keys."""

    def timed(worker: Callable[[int], dict[str, Any]]) -> Callable[[int], dict[str, Any]]:
        def step(count: int) -> dict[str, Any]:
            told = worker(count)
            return {**told, "seconds": told["seconds"] + (told["waited"] if loading else 0)}

        return step

    with ExitStack() as stack:
        workers = {}
        for name, (tree, opts) in contenders.items():
            own = folder / (name or "after")
            opts = (*opts, "MODEL.CACHE_FEATURES.FOLDER", str(own / "features"))
            command = contender_command(
                tree, _JOB, own, threads=threads, quick=quick, clock="wall", opts=opts
            )
            with said(name or "after"):
                worker, _ = stack.enter_context(started(command))
                workers[name] = timed(worker)
        turns = take_turns(workers, rounds=1 if quick else rounds)
    if "" not in turns:
        raise LeftOut("the package itself cannot be measured")
    return {name: turn.rates for name, turn in turns.items()}


def _rows(
    rates: Mapping[str, list[float]], prefix: str, suffix: str, peer: str, unit: str
) -> list[Result]:
    return [
        PairedResult.higher_is_better(
            f"pretraining/{prefix}{end}{suffix}", rates[end], rates[peer], unit
        )
        for end in rates
        if end != peer and peer in rates
    ]
