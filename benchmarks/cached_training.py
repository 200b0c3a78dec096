# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Compares a head's training step on cached features with a step that runs the frozen encoder.

Both are whole steps of the package's trainer with its data stream. They have the same recipe,
images, views (one per image) and initial weights, in one process without workers.
  online   reads the file, augments, runs the frozen encoder without gradients, trains the head
  cached   reads features in half precision from the cache, trains the head
The two take turns, and every round gives a ratio. There are two ratios: one of whole steps, and one
without the time in which the online step waits for images, as if workers on other cores loaded
them. Reading from the cache always counts.

The printed bound is (encoder + 3 head) / (3 head) in multiply-adds: the forward and backward pass
of the head count as three forward passes. Files, augmentation and memory traffic do not count, so
measured ratios can be above or below it.

The time to build a cache of K views does not count. Each view costs about the difference between an
online and a cached step, so caching saves time in runs of more than K epochs.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from detectron2.config import CfgNode

from benchmarks.cached_cases import CASES, Bound, Case, make_config, shrunk
from benchmarks.timing import Clock, PairedResult, Result, Sample, set_threads
from benchmarks.trainer_steps import Steps
from benchmarks.training import CLOCKS

ONLINE = "online"
CACHED = "cached"
_ROUNDS = 3
QUICK = ("285m_211", "285m_linear")


@dataclass(frozen=True)
class Turns:
    """Seconds per step of one trainer in each round.

    Attributes:
        step: seconds of the whole step.
        waiting: seconds of the step in which the trainer waited for its batch.
        losses: total loss of each step, including the warm-up.
    """

    step: list[float]
    waiting: list[float]
    losses: list[float]


@dataclass(frozen=True)
class Figures:
    """Measurements of one case."""

    case: Case
    bound: Bound
    online: Turns
    cached: Turns


def run(
    *,
    quick: bool,
    threads: int = 2,
    cases: Sequence[str] = (),
    rounds: int = _ROUNDS,
    clock: str = "wall",
) -> list[Result]:
    """Measures and prints each case; returns two rows per case."""
    set_threads(threads)
    rows: list[Result] = []
    if quick:
        rounds = 1
        cases = cases or QUICK
    for name in cases or CASES:
        case = CASES[name]
        if quick:
            case = shrunk(case)
        figures = measure_case(case, rounds=rounds, clock=CLOCKS[clock])
        rows += rows_of(name, figures)
        print(format_figures(figures), flush=True)
    return rows


def measure_case(
    case: Case, *, rounds: int, dtype: str = "float16", clock: Clock = time.perf_counter
) -> Figures:
    """Runs online and cached steps in turns, on images drawn in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        cfg = make_config(case, Path(folder), num_images=2 * case.batch)
        steps = {ONLINE: Steps(cfg, clock), CACHED: Steps(cached(cfg, dtype), clock)}
        bound = Bound.of(steps[ONLINE].trainer.bare_model, case.size)
        turns = time_turns(steps, rounds=rounds, steps=case.steps, clock=clock)
    return Figures(case, bound, turns[ONLINE], turns[CACHED])


def cached(cfg: CfgNode, dtype: str) -> CfgNode:
    """Returns the config with cached features, in a folder next to the images."""
    cfg = cfg.clone()
    cfg.OUTPUT_DIR = f"{cfg.OUTPUT_DIR}_cached"
    cfg.MODEL.CACHE_FEATURES.ENABLED = True
    cfg.MODEL.CACHE_FEATURES.DTYPE = dtype
    cfg.MODEL.CACHE_FEATURES.FOLDER = f"{cfg.OUTPUT_DIR}_features"
    return cfg


def time_turns(
    calls: Mapping[str, Callable[[], tuple[float, float]]],
    *,
    rounds: int,
    steps: int,
    warm_up: int = 1,
    clock: Clock = time.perf_counter,
) -> dict[str, Turns]:
    """Times steps in turns; reverses the order in every second round.

    Args:
        calls: functions that make one step, and return the seconds of waiting and the loss.
        rounds: number of timed turns of each function.
        steps: number of steps per turn; results are means over these.
        warm_up: number of untimed rounds at the start.
        clock: returns a time in seconds.
    """
    turns = {name: Turns([], [], []) for name in calls}
    for number in range(warm_up + rounds):
        names = list(calls)
        if number % 2 == 0:
            names.reverse()
        for name in names:
            start = clock()
            returned = [calls[name]() for _ in range(steps)]
            seconds = clock() - start
            turns[name].losses.extend(loss for _, loss in returned)
            if number >= warm_up:
                turns[name].step.append(seconds / steps)
                turns[name].waiting.append(statistics.fmean(waited for waited, _ in returned))
    return turns


def rows_of(name: str, figures: Figures) -> list[PairedResult]:
    """Returns two rows that compare cached with online rates: whole steps, and without loading."""
    batch = figures.case.batch
    online = figures.online
    cached = figures.cached
    rate = [batch / seconds for seconds in cached.step]
    computing = [whole - waited for whole, waited in zip(online.step, online.waiting, strict=True)]
    return [
        PairedResult.higher_is_better(
            f"cached_training/{name}_vs_{peer}", rate, [batch / s for s in seconds], "img/s"
        )
        for peer, seconds in (("online", online.step), ("online_without_loading", computing))
    ]


def format_figures(figures: Figures) -> str:
    """Returns text with the rates and ratios of a case, as median (minimum to maximum)."""
    case = figures.case
    bound = figures.bound
    height, width = case.size
    lines = [
        f"  {case.title}, {case.batch} images of {height} x {width} a step; MAdds: encoder "
        f"{bound.encoder / 1e9:.3g} G, head {bound.head / 1e9:.3g} G, which would make it "
        f"{bound.speedup:.3g} times as fast",
    ]
    for name, turns in ((ONLINE, figures.online), (CACHED, figures.cached)):
        rates = Sample.of([case.batch / seconds for seconds in turns.step])
        lines.append(f"    {name}: {rates} images per second; first loss {turns.losses[0]:.6g}")
    for row in rows_of("", figures):
        spread = Sample(row.ratio, row.ratio_least, row.ratio_greatest)
        lines.append(f"    {row.name.partition('/')[2].strip('_')}: {spread} times as fast")
    return "\n".join(lines)
