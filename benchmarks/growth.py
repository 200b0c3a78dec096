# Copyright (c) qbheat_det contributors. Apache-2.0.
"""How cost grows: pixels of an image, images of a batch, queries, processes of a training.

A forward pass of MF-285M + MF-Dec-211, as it is built and deployed, its encoder alone, and DETR-R50
beside them; a training step for the processes. The slope is the power with which the cost grows,
1 where it is linear. A row's "peer" is what the cost would be if it grew from the first point in
proportion (for queries: what the first point costs per query), so that a ratio below 1 is worse
than linear. Attention among the coarsest map's positions grows with the square of the pixels.

The picture of all points is ``growth.svg``, beside the rows.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.detectors import call_detectron2, load_mf_detr, random_images
from benchmarks.forms import DEPLOYED, EAGER, build
from benchmarks.growth_chart import Curves, plot_growth, slope
from benchmarks.processes import images_per_second
from benchmarks.timing import Result, set_threads, time_interleaved

SIZES = (320, 480, 640, 800, 1120, 1600)
BATCHES = (1, 2, 4, 8, 16, 32)
QUERIES = (100, 150, 200, 300)
PROCESSES = (1, 2)
TITLES = {
    "285m_211_eager": "285M + 211, eager",
    "285m_211_deploy": "285M + 211, deployed",
    "285m_eager": "285M alone, eager",
    "detr_r50_eager": "DETR-R50, eager",
    "285m_211_training": "training, 285M + 211",
}
_BATCH_SIDE, _QUERY_SIDE = 320, 640
_ROUNDS = 3
Forward = Callable[[Tensor], object]


def run(*, quick: bool, threads: int = 2) -> list[Result]:
    """Measures all.

    Args:
        quick: the two first points of small images, one round, nothing compiled.
        threads: CPU threads; of two processes each has one.
    """
    set_threads(threads)
    rows: list[Result] = []
    for axis, curves in (
        ("pixels", measure_pixels(quick=quick)),
        ("batch", measure_batches(quick=quick)),
        ("queries", measure_queries(quick=quick)),
        ("processes", measure_processes(quick=quick)),
    ):
        rows += rows_of(axis, curves)
        for name, points in curves.items():
            values = ", ".join(f"{x:.4g}: {y:.3g}" for x, y in points.items())
            print(f"  {axis:<10} {TITLES[name]:<22} slope {slope(points):5.2f}   {values}")
    return rows


def rows_of(axis: str, curves: Curves) -> list[Result]:
    """Returns a row for each point beside what it would be in proportion to the first.

    Args:
        axis: the thing that grows.
        curves: by name, y of each x: seconds, of "processes" images per second.
    """
    rows = []
    for name, points in curves.items():
        (first_x, first_y), *_ = points.items()
        for x, y in points.items():
            linear = first_y * x / first_x
            unit = "img/s" if axis == "processes" else "s"
            ratio = y / linear if axis == "processes" else linear / y
            rows.append(Result(f"growth/{axis}/{name}/{x:g}", y, linear, unit, ratio))
    return rows


def draw(rows: Sequence[Result]) -> bytes:
    """Returns the picture of all rows, as SVG."""
    return plot_growth(curves_of(rows), TITLES)


def curves_of(rows: Sequence[Result]) -> dict[str, dict[str, dict[float, float]]]:
    """Returns what ``rows_of`` was given, by the thing that grows."""
    panels: dict[str, dict[str, dict[float, float]]] = {}
    for row in rows:
        _, axis, name, x = row.name.split("/")
        panels.setdefault(axis, {}).setdefault(name, {})[float(x)] = row.ours
    return panels


def measure_pixels(*, quick: bool) -> Curves:
    """Seconds of a forward pass over million pixels of one square image."""
    sides = (64, 128) if quick else SIZES
    forwards = contenders(sides, quick=quick)
    points = {
        side * side / 1e6: time_of(forwards, random_images(side, side), quick=quick)
        for side in sides
    }
    return {name: {x: seconds[name] for x, seconds in points.items()} for name in forwards}


def measure_batches(*, quick: bool) -> Curves:
    """Seconds of a forward pass over images of a batch."""
    side, batches = (64, BATCHES[:2]) if quick else (_BATCH_SIDE, BATCHES)
    forwards = contenders((side,), quick=quick)
    points = {
        float(number): time_of(forwards, random_images(side, side, number=number), quick=quick)
        for number in batches
    }
    return {name: {x: seconds[name] for x, seconds in points.items()} for name in forwards}


def measure_queries(*, quick: bool) -> Curves:
    """Seconds of a forward pass over queries: most of the cost is the maps', whatever they are."""
    side, numbers = (64, QUERIES[:2]) if quick else (_QUERY_SIDE, QUERIES)
    torch.manual_seed(0)
    forwards: dict[str, Forward] = {
        str(number): partial(call_detectron2, load_mf_detr("285M", (2, 1, 1), number)())
        for number in numbers
    }
    seconds = time_of(forwards, random_images(side, side), quick=quick)
    return {"285m_211_eager": {float(name): value for name, value in seconds.items()}}


def measure_processes(*, quick: bool) -> Curves:
    """Images per second of training over processes, each on one thread."""
    side, steps = (64, 1) if quick else (320, 6)
    rates = {float(n): images_per_second(n, side=side, steps=steps) for n in PROCESSES}
    return {"285m_211_training": rates}


def contenders(sides: Sequence[int], *, quick: bool) -> dict[str, Forward]:
    """Returns what is measured over pixels and batches, by the keys of ``TITLES``.

    Args:
        sides: of the square images to come.
        quick: nothing is compiled.
    """
    sizes = tuple((side, side) for side in sides)
    whole = build("285m_211", EAGER)
    model = whole.args[0]  # type: ignore[attr-defined]
    return {
        "285m_211_eager": whole,
        "285m_211_deploy": build("285m_211", DEPLOYED, quick=quick, image_sizes=sizes),
        "285m_eager": model.backbone,
        "detr_r50_eager": build("detr_r50", EAGER),
    }


def time_of(forwards: dict[str, Forward], images: Tensor, *, quick: bool) -> dict[str, float]:
    """Returns the median seconds of each forward, taken in turns, after a first call."""
    with torch.inference_mode():
        samples = time_interleaved(
            {name: partial(forward, images) for name, forward in forwards.items()},
            rounds=1 if quick else _ROUNDS,
        )
    return {name: sample.median for name, sample in samples.items()}
