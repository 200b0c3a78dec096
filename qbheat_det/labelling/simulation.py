# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Simulates rounds of labelling on a labelled data set, to compare selection strategies."""

import dataclasses
import hashlib
import itertools
import json
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from torch import Tensor

from qbheat_det.analysis import plotting
from qbheat_det.api import embed_images, find_weights, load_detector
from qbheat_det.api.training import train_afresh
from qbheat_det.core.errors import UserError
from qbheat_det.core.files import (
    parse_record,
    refuse_second_command,
    replace_folders,
    write_atomically,
)
from qbheat_det.data import Annotations, open_source
from qbheat_det.engine import RunFlags, read_config

from .coverage import COVERING, choose_balanced, cover, unit_vectors
from .selection import BALANCED, check_whole, count_objects, predict_boxes

_CONFIG = "custom/cached_retinanet_285M_probe.yaml"
_POINTS = "points.json"
_CURVE = "curve.svg"


@dataclass(frozen=True)
class Point:
    """Validation results of a detector that was trained on images that a strategy selected.

    ``images`` and ``boxes`` are the numbers of training images and their boxes. ``ap`` and ``ap50``
    are in percent.
    """

    strategy: str
    seed: int
    images: int
    boxes: int
    ap: float
    ap50: float


def simulate(
    data: str,
    budgets: Sequence[int],
    output: str | Path,
    *,
    val: str = "",
    images: str = "",
    strategies: Sequence[str] = ("random", "balanced"),
    seeds: Sequence[int] = (1, 2, 3),
    encoder: str = "distill/285M",
    opts: Sequence[str] = (),
    max_left_out: float | None = None,
) -> list[Point]:
    """Trains a detector for each strategy, seed and number of images. Returns all results.

    A strategy starts without labelled images and adds images up to each budget. "balanced" needs a
    detector, so it selects random images for the first budget, and then uses the detector of the
    budget before. The detector is a RetinaNet head on cached features of the frozen encoder.
    Calling the function again continues an interrupted simulation.

    Args:
        data: data set with boxes, in any format of ``--data``.
        budgets: numbers of training images.
        output: folder for ``points.json``, ``curve.svg`` and ``simulation/``, with the last run.
        val: validation data; by default the validation part of ``data``.
        images: folder of the images, if they are not beside a COCO json; also tried for ``val``.
        strategies: strategies of ``select``.
        seeds: seeds of selection and training.
        encoder: weights of the frozen encoder.
        opts: overrides of the training config, as a flat list of keys and values.
        max_left_out: share of images or boxes that may have faults; by default 0.1.

    Raises:
        UserError: the data have no boxes or no validation part, an image cannot be read, an
            argument is invalid, or ``output`` has other files or is in use by another process.
    """
    budgets = sorted(set(budgets))
    for seed in seeds:
        check_whole("seeds", seed)
    file, evaluated = open_boxes(data, val, images, budgets, strategies)
    file.account.check(max_left_out)
    evaluated.account.check(max_left_out)
    folder = Path(output)
    settings = [file.keep(), evaluated.keep(), find_weights(encoder), *opts]
    # Points of other data or settings cannot be continued.
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    with refuse_second_command(folder):
        points = read_points(folder, digest)
        run_folder = folder / "simulation"
        replace_folders(run_folder)
        flags = make_flags(file, evaluated, run_folder, encoder, opts)
        vectors = _embed(_list_paths(file), encoder)
        for seed, strategy in itertools.product(seeds, strategies):
            done = {p.images for p in points if (p.strategy, p.seed) == (strategy, seed)}
            for point in _train_rounds(strategy, seed, budgets, done, file, vectors, flags):
                points.append(point)
                write_points(points, folder, digest)
    return points


def _list_paths(file: Annotations) -> list[str]:
    """Returns the paths of the images of a data set."""
    return [os.path.join(file.image_root, image["file_name"]) for image in file.images]


def _embed(paths: Sequence[str], encoder: str) -> Tensor:
    """Returns the vector of each image. Raises a ``UserError`` if one cannot be read."""
    embedded = embed_images(paths, encoder)
    if embedded.unreadable:
        path, reason = next(iter(embedded.unreadable.items()))
        raise UserError(f"cannot read the image '{path}': {reason}")
    return unit_vectors(embedded.vectors)


def _train_rounds(
    strategy: str,
    seed: int,
    budgets: Sequence[int],
    done: Collection[int],
    file: Annotations,
    vectors: Tensor,
    flags: RunFlags,
) -> Iterator[Point]:
    """Selects images up to each budget, trains on them, and yields the results.

    Args:
        strategy: strategy of selection.
        seed: seed of selection and training.
        budgets: numbers of training images, in increasing order.
        done: budgets whose results are known, which are not yielded.
        file: the labelled images to select from.
        vectors: their vectors.
        flags: flags of the runs, see ``make_flags``.
    """
    if set(done).issuperset(budgets):
        return
    paths = _list_paths(file)
    chosen: list[int] = []
    run: Path | None = None
    for budget in budgets:
        chosen = add_images(strategy, paths, vectors, budget, chosen, seed, run)
        # "balanced" is trained again, because its next images depend on the detector.
        if budget in done and strategy != BALANCED:
            continue
        labels = file.keep({file.images[i]["file_name"] for i in chosen})
        run, metrics = train_on(labels, flags, Path(flags.output).with_name("labels.json"), seed)
        if budget not in done:
            yield Point(strategy, seed, budget, len(labels["annotations"]), *metrics)


def make_flags(
    file: Annotations, evaluated: Annotations, folder: Path, encoder: str, opts: Sequence[str]
) -> RunFlags:
    """Returns the flags of all runs, without the training data.

    Writes the labels to evaluate on, ``evaluated``, to a file in ``folder``.
    """
    val = folder / "val.json"
    write_atomically(val, json.dumps(evaluated.keep()).encode())
    flags = RunFlags(
        config_file=_CONFIG,
        images=file.image_root,
        val=str(val),
        val_images=evaluated.image_root,
        weights=encoder,
        output=str(folder / "run"),
        opts=opts,
    )
    read_config(flags)  # a wrong key is found before features are computed
    return flags


def train_on(
    labels: dict[str, Any], flags: RunFlags, file: Path, seed: int
) -> tuple[Path | None, list[float]]:
    """Writes labels in COCO's format to a file, and trains on them.

    Returns the folder of the run, and [AP, AP50] in percent. Without boxes, nothing is trained, and
    the result is (None, [0, 0]).
    """
    if not labels["annotations"]:
        return None, [0.0, 0.0]
    write_atomically(file, json.dumps(labels).encode())
    flags = dataclasses.replace(flags, data=str(file), opts=["SEED", str(seed), *flags.opts])
    _, results = train_afresh(flags)
    # Detectron2 reports nan if there are no detections.
    metrics = [round(float(np.nan_to_num(results["bbox"][key])), 2) for key in ("AP", "AP50")]
    return Path(flags.output), metrics


def open_boxes(
    data: str, val: str, images: str, budgets: Sequence[int], strategies: Sequence[str]
) -> tuple[Annotations, Annotations]:
    """Returns the annotations of the images to select from, and of those to evaluate on.

    ``simulate`` describes the arguments. ``budgets`` are in ascending order.
    """
    opened = open_source(data, images)
    if not opened.has_boxes or not (val or opened.val):
        raise UserError(f"'{data}' has no boxes or no validation part: add --val")
    for strategy in strategies:
        if strategy not in (*COVERING, BALANCED):
            raise UserError(f"there is no strategy '{strategy}'")
    file = opened.annotations[opened.train.part]
    file.check()
    if not budgets or budgets[0] < 1 or budgets[-1] > len(file.images):
        raise UserError(
            f"budgets are {budgets}, but must be from 1 to {len(file.images):,}, the number of "
            f"images in '{data}'"
        )
    evaluated_data = opened
    if val:
        evaluated_data = open_source(val, likely_root=images)
    source = evaluated_data.val or evaluated_data.train
    if not source.has_boxes:
        raise UserError(f"'{val}' has no boxes")
    evaluated = evaluated_data.annotations[source.part]
    evaluated.check()
    return file, evaluated


def add_images(
    strategy: str,
    paths: Sequence[str],
    vectors: Tensor,
    budget: int,
    chosen: list[int],
    seed: int,
    run: Path | None,
) -> list[int]:
    """Returns ``chosen`` and the indices of further images, together ``budget`` indices.

    ``run`` is the folder of the detector that was trained on ``chosen``; None if there is none.
    """
    num_new = budget - len(chosen)
    if strategy == BALANCED and run:
        counts = count_objects(paths, predict_boxes(paths, load_detector(run)))
        return chosen + choose_balanced(vectors, counts, num_new, chosen)
    if strategy == BALANCED:
        strategy = "random"
    return chosen + cover(strategy, vectors, num_new, chosen, seed=seed)


def read_points(folder: Path, digest: str) -> list[Point]:
    """Returns the points of an interrupted simulation, or [] if the folder has no simulation.

    Raises a ``UserError`` if the folder has a simulation with another ``digest``, or files that are
    not of a simulation.
    """
    path = folder / _POINTS
    curve = folder / _CURVE
    if not path.is_file():
        if curve.exists():
            raise UserError(f"'{curve}' is not of a simulation: choose another --output")
        return []
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        file_digest = content["digest"]
        entries = list(content["points"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"'{path}' is not a file of points: remove it") from error
    if file_digest != digest:
        raise UserError(f"'{path}' has other data or settings: choose another --output")
    return [parse_record(Point, entry, f"'{path}'") for entry in entries]


def write_points(points: Sequence[Point], folder: Path, digest: str) -> None:
    """Writes ``points.json`` and ``curve.svg``."""
    content = {"digest": digest, "points": [asdict(point) for point in points]}
    write_atomically(folder / _POINTS, json.dumps(content).encode())
    write_atomically(folder / _CURVE, plotting.chart_image(plot_points(points)).content)


@plotting.themed
def plot_points(points: Sequence[Point]) -> Figure:
    """Plots the mean and range of AP50 over seeds against the number of images, per strategy."""
    figure, axes = plotting.start_chart(height=3.6)
    names = list(dict.fromkeys(point.strategy for point in points))
    for name, style in zip(names, plotting.list_styles(len(names)), strict=True):
        by_size: dict[int, list[float]] = {}
        for point in points:
            if point.strategy == name:
                by_size.setdefault(point.images, []).append(point.ap50)
        sizes = sorted(by_size)
        values = [by_size[size] for size in sizes]
        axes.plot(sizes, [np.mean(ap50) for ap50 in values], label=name, **style)
        axes.fill_between(
            sizes,
            [min(ap50) for ap50 in values],
            [max(ap50) for ap50 in values],
            color=style["color"],
            alpha=0.15,
        )
    axes.set_xlabel("images with labels")
    axes.set_ylabel("AP50 (%)")
    plotting.add_legend(figure, axes)
    return figure
