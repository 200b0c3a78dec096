# Copyright (c) qbheat_det contributors. Apache-2.0.
"""How cost grows: pixels of an image, images of a batch, queries.

A forward pass of MF-285M + MF-Dec-211, as it is built and deployed, its encoder alone, and DETR-R50
beside them. The slope is the power with which the cost grows, 1 where it is linear. A row's "peer"
is what the cost would be if it grew from the first point in proportion, so that a ratio below 1 is
worse than linear. Attention among the coarsest map's positions grows with the square of the pixels.
"""

import io
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from benchmarks.detectors import call_detectron2, load_mf_detr, random_images
from benchmarks.forms import DEPLOYED, EAGER, build
from benchmarks.timing import Result, samples_in_rounds, set_threads

SIZES = (320, 480, 640, 800, 1120, 1600)
BATCHES = (1, 2, 4, 8, 16, 32)
QUERIES = (100, 150, 200, 300)
TITLES = {
    "285m_211_eager": "285M + 211, eager",
    "285m_211_deploy": "285M + 211, deployed",
    "285m_eager": "285M alone, eager",
    "detr_r50_eager": "DETR-R50, eager",
}
_LABELS = {  # of the panels, and whether their axes are logarithmic
    "pixels": ("million pixels of an image", True),
    "batch": ("images of a batch, 320 x 320", True),
    "queries": ("queries, 640 x 640", False),
}
_BATCH_SIDE, _QUERY_SIDE = 320, 640
_ROUNDS = 3
Forward = Callable[[Tensor], object]
Curves = Mapping[str, Mapping[float, float]]


def run(*, quick: bool, threads: int = 2) -> list[Result]:
    """Measures all.

    Args:
        quick: the two first points of small images, one round, nothing compiled.
        threads: CPU threads.
    """
    set_threads(threads)
    rows: list[Result] = []
    for axis, curves in (
        ("pixels", measure_pixels(quick=quick)),
        ("batch", measure_batches(quick=quick)),
        ("queries", measure_queries(quick=quick)),
    ):
        rows += rows_of(axis, curves)
        for name, points in curves.items():
            values = ", ".join(f"{x:.4g}: {y:.3g}" for x, y in points.items())
            print(f"  {axis:<10} {TITLES[name]:<22} slope {slope(points):5.2f}   {values}")
    return rows


def rows_of(axis: str, curves: Curves) -> list[Result]:
    """Returns a row for each point beside what it would be in proportion to the first.

    Args:
        axis: what grows.
        curves: by name, seconds of each x.
    """
    rows = []
    for name, points in curves.items():
        (first_x, first_y), *_ = points.items()
        for x, y in points.items():
            linear = first_y * x / first_x
            rows.append(Result(f"growth/{axis}/{name}/{x:g}", y, linear, "s", linear / y))
    return rows


def slope(points: Mapping[float, float]) -> float:
    """Returns the power with which y grows: the slope of a line through the logarithms."""
    xs, ys = ([math.log(value) for value in side] for side in (points, points.values()))
    x_mean, y_mean = sum(xs) / len(xs), sum(ys) / len(ys)
    above = sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True))
    return above / sum((x - x_mean) ** 2 for x in xs)


def draw(rows: Sequence[Result]) -> bytes:
    """Returns the picture of all rows as SVG: a panel for each thing that grows."""
    from matplotlib.figure import Figure

    panels: dict[str, dict[str, dict[float, float]]] = {}
    for row in rows:
        _, axis, name, x = row.name.split("/")
        panels.setdefault(axis, {}).setdefault(name, {})[float(x)] = row.ours
    figure = Figure(figsize=(9.6, 3.9 * math.ceil(len(panels) / 2)), layout="constrained")
    grid = figure.subplots(math.ceil(len(panels) / 2), 2, squeeze=False).flat
    for axes, (axis, curves) in zip(grid, panels.items(), strict=False):
        label_of_x, is_logarithmic = _LABELS[axis]
        for name, points in curves.items():
            label = f"{TITLES.get(name, name)}: {slope(points):.2f}"
            axes.plot(list(points), list(points.values()), label=label, marker="o", ms=4)
        axes.set(xlabel=label_of_x, ylabel="seconds")
        if is_logarithmic:
            axes.set(xscale="log", yscale="log")
        else:
            axes.set_ylim(bottom=0)
        xs = sorted({x for points in curves.values() for x in points})
        axes.set_xticks(xs, [f"{x:.3g}" for x in xs])
        axes.minorticks_off()
        axes.grid(color="0.9")
        axes.legend(frameon=False, fontsize=8, title="slope", title_fontsize=8)
    for axes in list(grid)[len(panels) :]:
        axes.set_visible(False)
    stream = io.BytesIO()
    figure.savefig(stream, format="svg", metadata={"Date": None})
    return stream.getvalue()


def measure_pixels(*, quick: bool) -> Curves:
    """Seconds of a forward pass over million pixels of one square image."""
    sides = (64, 128) if quick else SIZES
    images = {side * side / 1e6: random_images(side, side) for side in sides}
    return _measure_images(images, build_forwards(sides, quick=quick), quick=quick)


def measure_batches(*, quick: bool) -> Curves:
    """Seconds of a forward pass over images of a batch."""
    side, batches = (64, BATCHES[:2]) if quick else (_BATCH_SIDE, BATCHES)
    images = {float(number): random_images(side, side, number=number) for number in batches}
    return _measure_images(images, build_forwards((side,), quick=quick), quick=quick)


def _measure_images(
    images: Mapping[float, Tensor], forwards: Mapping[str, Forward], *, quick: bool
) -> Curves:
    points = {x: time_forwards(forwards, batch, quick=quick) for x, batch in images.items()}
    return {name: {x: seconds[name] for x, seconds in points.items()} for name in forwards}


def measure_queries(*, quick: bool) -> Curves:
    """Seconds of a forward pass over queries: most of the cost is the maps', whatever they are."""
    side, numbers = (64, QUERIES[:2]) if quick else (_QUERY_SIDE, QUERIES)
    torch.manual_seed(0)
    forwards: dict[str, Forward] = {
        str(number): partial(call_detectron2, load_mf_detr("285M", (2, 1, 1), number)())
        for number in numbers
    }
    seconds = time_forwards(forwards, random_images(side, side), quick=quick)
    return {"285m_211_eager": {float(name): value for name, value in seconds.items()}}


def build_forwards(sides: Sequence[int], *, quick: bool) -> dict[str, Forward]:
    """Returns what is measured over pixels and batches, by the keys of ``TITLES``.

    Args:
        sides: of the square images to come.
        quick: nothing is compiled.
    """
    sizes = tuple((side, side) for side in sides)
    eager = build("285m_211", EAGER)
    model = eager.args[0]  # type: ignore[attr-defined]
    return {
        "285m_211_eager": eager,
        "285m_211_deploy": build("285m_211", DEPLOYED, quick=quick, image_sizes=sizes),
        "285m_eager": model.backbone,
        "detr_r50_eager": build("detr_r50", EAGER),
    }


def time_forwards(
    forwards: Mapping[str, Forward], images: Tensor, *, quick: bool
) -> dict[str, float]:
    """Returns the median seconds of each forward, taken in turns, after a first call."""
    calls = {name: partial(forward, images) for name, forward in forwards.items()}
    with torch.inference_mode():
        samples = samples_in_rounds(calls, rounds=1 if quick else _ROUNDS)
    return {name: sample.median for name, sample in samples.items()}
