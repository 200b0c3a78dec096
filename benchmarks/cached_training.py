# Copyright (c) qbheat_det contributors. Apache-2.0.
"""A training step of a head on cached features beside the same step with its frozen encoder.

Both are whole steps of the package's trainer over its own stream: same recipe, same images, same
views (one of each image), same weights at the start, one process without workers.
  online   reads the file, augments, runs the frozen encoder without a graph, trains the head
  cached   reads features of half precision from the cache, trains the head
The two take turns, and a ratio is taken in every round. It is given twice: with all that a step
takes, and with the time in which the online step waits for its images left out, as if workers on
other cores gave them for nothing; reading from the cache stays in.

The bound beside it counts multiply-adds: a head's forward and backward as three forward passes,
(encoder + 3 head) / (3 head). It holds for arithmetic alone; files, augmentation and memory
traffic, which multiply-adds do not count, can carry a ratio beyond it or keep it below.

Building a cache of K views is left out. It costs, for each view, about what an online step has more
than a cached one, so that a run of more than K epochs is the faster for it.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.utils.events import EventStorage

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.cached_cases import CASES, Bound, Case, make_config
from benchmarks.timing import (
    ROOT,
    PairedResult,
    Result,
    Sample,
    environment,
    format_results,
    set_threads,
    write_results,
)
from benchmarks.trainer_overhead import give_batches, whole_step
from qbheat_det.core.errors import exit_on_user_error

Clock = Callable[[], float]
ONLINE, CACHED = "online", "cached"
_ROUNDS = 3
QUICK = ("285m_211", "285m_linear")
_EXAMPLES = """\
examples:
  make bench ARGS="--only cached_training"
  python benchmarks/cached_training.py --cases 3.7g_211 --rounds 7
"""


@dataclass(frozen=True)
class Turns:
    """Seconds of a step of one trainer in each round.

    Attributes:
        step: the whole step.
        waiting: the part of it in which the trainer waited for its batch.
        losses: total loss of each step, those of warming up first.
    """

    step: list[float]
    waiting: list[float]
    losses: list[float]


@dataclass(frozen=True)
class Figures:
    """What was measured of a case."""

    case: Case
    bound: Bound
    online: Turns
    cached: Turns


def run(*, quick: bool, threads: int = 2) -> list[Result]:
    """Measures all cases.

    Args:
        quick: two cases, two small images, one round, to see that everything runs.
        threads: CPU threads.
    """
    return measure(QUICK if quick else list(CASES), threads=threads, quick=quick)


def measure(
    cases: Sequence[str],
    *,
    rounds: int = _ROUNDS,
    threads: int = 2,
    quick: bool = False,
    clock: Clock = time.perf_counter,
) -> list[Result]:
    """Measures, prints a table as it goes, and returns two rows a case.

    Args:
        cases: names of ``CASES``.
        rounds: timed turns of each trainer.
        threads: CPU threads.
        quick: small images, one round.
        clock: seconds.
    """
    set_threads(threads)
    print(f"  {'':<34}{'images per second':<54}{'times as fast as online':<52}{'by MAdds':>8}")
    print(f"  {'':<34}{'online':<27}{'cached':<27}{'whole step':<26}{'without loading':<26}")
    rows: list[Result] = []
    for name in cases:
        case = CASES[name]
        if quick:
            case, rounds = shrunk(case), 1
        figures = measure_case(case, rounds=rounds, clock=clock)
        rows += rows_of(name, figures)
        print(format_figures(figures), flush=True)
    return rows


def shrunk(case: Case) -> Case:
    """Returns the case with two images of 64 pixels a step."""
    opts = (
        {"INPUT.MIN_SIZE_TRAIN": (64,), "INPUT.MAX_SIZE_TRAIN": 107}
        if case.has_boxes
        else {"INPUT.PRETRAIN.SIZE": 64}
    )
    size = (64, 107) if case.has_boxes else (64, 64)
    return replace(case, size=size, batch=2, steps=1, opts={**case.opts, **opts})


def measure_case(
    case: Case, *, rounds: int, dtype: str = "float16", clock: Clock = time.perf_counter
) -> Figures:
    """Trains both ways in turns, on images drawn for it in a folder that is removed.

    Args:
        case: what to train.
        rounds: timed turns of each.
        dtype: of the cache.
        clock: seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        cfg = make_config(case, Path(folder), num_images=2 * case.batch)
        steps = {ONLINE: Steps(cfg, clock), CACHED: Steps(cached(cfg, dtype), clock)}
        bound = Bound.of(steps[ONLINE].trainer.bare_model, case.size)
        turns = time_turns(steps, rounds=rounds, steps=case.steps, clock=clock)
    return Figures(case, bound, turns[ONLINE], turns[CACHED])


def cached(cfg: CfgNode, dtype: str) -> CfgNode:
    """Returns the config with its features cached in a folder beside its images."""
    cfg = cfg.clone()
    cfg.OUTPUT_DIR = f"{cfg.OUTPUT_DIR}_cached"
    cfg.MODEL.CACHE_FEATURES.ENABLED = True
    cfg.MODEL.CACHE_FEATURES.DTYPE = dtype
    cfg.MODEL.CACHE_FEATURES.FOLDER = f"{cfg.OUTPUT_DIR}_features"
    return cfg


class Steps:
    """Steps of a trainer, one a call, its cache built if it has one."""

    def __init__(self, cfg: CfgNode, clock: Clock) -> None:
        from qbheat_det.engine import Trainer

        Path(cfg.OUTPUT_DIR).mkdir(parents=True)  # logs are written, as in any run
        torch.manual_seed(0)  # all trainers of a case begin with the same weights
        self.trainer: Any = Trainer(cfg)
        if self.trainer.cached_features:
            self.trainer.cached_features.prepare(self.trainer.data_loader)
        self._images = _TimedIterator(iter(self.trainer.data_loader), clock)
        give_batches(self.trainer, self._images)
        self.trainer.storage = EventStorage()
        with self.trainer.storage:
            for hook in self.trainer._hooks:
                hook.before_train()

    def __call__(self) -> tuple[float, float]:
        """Makes a step; returns the seconds that it waited for its images, and its total loss."""
        with self.trainer.storage as storage:
            whole_step(self.trainer)
            return self._images.seconds, storage.history("total_loss").latest()


class _TimedIterator:
    """Hands batches on, and knows how long the last one took."""

    def __init__(self, batches: Iterator[Any], clock: Clock) -> None:
        self._batches = batches
        self._clock = clock
        self.seconds = 0.0

    def __iter__(self) -> "_TimedIterator":
        return self

    def __next__(self) -> Any:
        start = self._clock()
        batch = next(self._batches)
        self.seconds = self._clock() - start
        return batch


def time_turns(
    calls: Mapping[str, Callable[[], tuple[float, float]]],
    *,
    rounds: int,
    steps: int,
    warm_up: int = 1,
    clock: Clock = time.perf_counter,
) -> dict[str, Turns]:
    """Times steps in turns; in every other round the order is the other way round.

    Args:
        calls: make a step each, and return its seconds of waiting and its loss.
        rounds: timed turns of each.
        steps: of a turn; figures are their means.
        warm_up: untimed rounds before the first timed one.
        clock: seconds.
    """
    turns = {name: Turns([], [], []) for name in calls}
    for number in range(warm_up + rounds):
        for name in list(calls)[:: 1 if number % 2 else -1]:
            start = clock()
            told = [calls[name]() for _ in range(steps)]
            seconds = clock() - start
            turns[name].losses.extend(loss for _, loss in told)
            if number >= warm_up:
                turns[name].step.append(seconds / steps)
                turns[name].waiting.append(statistics.fmean(waited for waited, _ in told))
    return turns


def rows_of(name: str, figures: Figures) -> list[PairedResult]:
    """Returns the case's rates, cached beside online: with all of a step, and without loading."""
    batch, online, cached = figures.case.batch, figures.online, figures.cached
    rate = [batch / seconds for seconds in cached.step]
    computing = [whole - waited for whole, waited in zip(online.step, online.waiting, strict=True)]
    return [
        PairedResult.higher_is_better(
            f"cached_training/{name}_vs_{peer}", rate, [batch / s for s in seconds], "img/s"
        )
        for peer, seconds in (("online", online.step), ("online_without_loading", computing))
    ]


def format_figures(figures: Figures) -> str:
    """Returns a case's lines of the table; medians (least to greatest)."""
    case, bound = figures.case, figures.bound
    whole, computing = rows_of("", figures)
    rates = [
        _shown(Sample.of([case.batch / seconds for seconds in turns.step]))
        for turns in (figures.online, figures.cached)
    ]
    ratios = [str(Sample(r.ratio, r.ratio_least, r.ratio_greatest)) for r in (whole, computing)]
    verdict = ""
    if case.bar:
        reached = "reached" if whole.ratio >= case.bar else "not reached"
        verdict = f"; wanted {case.bar:g}: {reached}"
    height, width = case.size
    return (
        f"  {case.title:<34}{rates[0]:<27}{rates[1]:<27}{ratios[0]:<26}{ratios[1]:<26}"
        f"{bound.speedup:>8.3g}\n"
        f"    {case.batch} images of {height} x {width} a step; MAdds an image: encoder "
        f"{bound.encoder / 1e9:.3g} G, head {bound.head / 1e9:.3g} G; first losses "
        f"{figures.online.losses[0]:.6g} and {figures.cached.losses[0]:.6g}{verdict}"
    )


def _shown(rates: Sample) -> str:
    """As ``str(rates)``, without exponents, which that has from a thousand on."""
    if rates.greatest < 100:
        return str(rates)
    return f"{rates.median:,.0f} ({rates.least:,.0f} to {rates.greatest:,.0f})"


@exit_on_user_error
def main(argv: Sequence[str] | None = None) -> None:
    """Parses the flags and measures what they name."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--cases",
        nargs="+",
        default=list(CASES),
        choices=CASES,
        metavar="NAME",
        help=f"of {', '.join(CASES)} (default: all)",
    )
    parser.add_argument("--rounds", type=int, default=_ROUNDS, help=f"(default: {_ROUNDS})")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: 2)")
    parser.add_argument(
        "--cpu-seconds",
        action="store_true",
        help="count the seconds of this process alone, on a machine that is busy with others; "
        "of several threads they add up",
    )
    parser.add_argument("--output", type=Path, default=ROOT / "output" / "bench")
    args = parser.parse_args(argv)
    set_threads(args.threads)
    print(environment())
    clock = time.process_time if args.cpu_seconds else time.perf_counter
    rows = measure(args.cases, rounds=args.rounds, threads=args.threads, clock=clock)
    path = args.output / "cached_training.json"
    write_results(rows, path)
    print(f"{format_results(rows)}\nwritten to {path}")


if __name__ == "__main__":
    main()
