# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Simulates rounds of labelling on a labelled data set, to compare selection strategies."""

import dataclasses
import hashlib
import itertools
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from torch import Tensor

from qbheat_det.analysis import plotting
from qbheat_det.api.training import train_afresh
from qbheat_det.checkpoint import find_weights
from qbheat_det.core.errors import UserError
from qbheat_det.core.files import parse_record, replace_folders, write_atomically
from qbheat_det.data import Annotations, open_source
from qbheat_det.engine import RunFlags, read_config

from .coverage import COVERING, choose_balanced, cover, unit_vectors
from .embedding import embed_images
from .selection import BALANCED, check_whole, count_objects, open_detector, predict_boxes

_CONFIG = "custom/cached_retinanet_285M_probe.yaml"
_POINTS, _CURVE = "points.json", "curve.svg"


@dataclass(frozen=True)
class Point:
    """Validation results, in percent, of a detector trained on images that a strategy selected."""

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
    """Trains a detector for each strategy, seed and number of images.

    A strategy starts without labelled images and adds images up to each budget. "balanced" needs a
    detector, so it uses "random" for the first budget. The detector is a RetinaNet head on cached
    features of the frozen encoder. Calling the function again continues an interrupted simulation.

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
            argument is invalid, or ``output`` has files of others.
    """
    budgets = sorted({*budgets})
    for seed in seeds:
        check_whole("seeds", seed)
    file, evaluated = _open_boxes(data, val, images, budgets, strategies)
    for one in (file, evaluated):
        one.account.check(max_left_out)
    paths = [os.path.join(file.image_root, image["file_name"]) for image in file.images]
    folder = Path(output)
    digest = _hash([file.keep(), evaluated.keep(), find_weights(encoder), *opts])
    points = _read_points(folder, digest)
    replace_folders(own := folder / "simulation")
    flags = _make_flags(file, evaluated, own, encoder, opts)
    vectors = _embed(paths, encoder)
    for seed, strategy in itertools.product(seeds, strategies):
        done = {one.images for one in points if (one.strategy, one.seed) == (strategy, seed)}
        if done >= set(budgets):
            continue
        chosen: list[int] = []
        run: Path | None = None
        for budget in budgets:
            chosen = _choose(strategy, paths, vectors, budget, chosen, seed, run)
            if budget in done and strategy != BALANCED:
                continue
            names = {file.images[i]["file_name"] for i in chosen}
            run, num_boxes, metrics = _train(file.keep(names), flags, own / "labels.json", seed)
            if budget not in done:
                points.append(Point(strategy, seed, budget, num_boxes, *metrics))
                _write_points(points, folder, digest)
    return points


def _make_flags(
    file: Annotations, evaluated: Annotations, folder: Path, encoder: str, opts: Sequence[str]
) -> RunFlags:
    """Writes the labels to evaluate on to a file, and returns the flags of runs, without data."""
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
    read_config(flags, {})  # a wrong key is found before features are computed
    return flags


def _embed(paths: Sequence[str], encoder: str) -> Tensor:
    """Returns unit vectors (N, D) of the images."""
    embedded = embed_images(paths, encoder)
    for path, reason in embedded.unreadable.items():
        raise UserError(f"cannot read the image '{path}': {reason}")
    return unit_vectors(embedded.vectors)


def _train(
    labels: dict[str, Any], flags: RunFlags, file: Path, seed: int
) -> tuple[Path | None, int, list[float]]:
    """Writes the labels to a file and trains on them.

    Returns the folder of the run (None if there are no boxes), the number of boxes, and [AP, AP50].
    """
    if not labels["annotations"]:
        return None, 0, [0.0, 0.0]
    write_atomically(file, json.dumps(labels).encode())
    flags = dataclasses.replace(flags, data=str(file), opts=["SEED", str(seed), *flags.opts])
    _, results = train_afresh(flags)
    # Detectron2 reports nan if there are no detections.
    metrics = [round(float(np.nan_to_num(results["bbox"][key])), 2) for key in ("AP", "AP50")]
    return Path(flags.output), len(labels["annotations"]), metrics


def _open_boxes(
    data: str, val: str, images: str, budgets: Sequence[int], strategies: Sequence[str]
) -> tuple[Annotations, Annotations]:
    """Returns the images to select from, and the images to evaluate on."""
    opened = open_source(data, images)
    if not opened.has_boxes or not (val or opened.val):
        raise UserError(f"'{data}' has no boxes or no validation part: add --val")
    if unknown := {*strategies} - {*COVERING, BALANCED}:
        raise UserError(f"there is no strategy '{unknown.pop()}'")
    file = opened.annotations[opened.train.part]
    file.check()
    if not budgets or budgets[0] < 1 or budgets[-1] > len(file.images):
        most = f"{len(file.images):,}, the number of images in '{data}'"
        raise UserError(f"budgets are {budgets}, but must be from 1 to {most}")
    val_data = open_source(val, likely_root=images) if val else opened
    source = val_data.val or val_data.train
    if not source.has_boxes:
        raise UserError(f"'{val}' has no boxes")
    evaluated = val_data.annotations[source.part]
    evaluated.check()
    return file, evaluated


def _choose(
    strategy: str,
    paths: Sequence[str],
    vectors: Tensor,
    budget: int,
    chosen: list[int],
    seed: int,
    run: Path | None,
) -> list[int]:
    """Adds indices of images to a copy of ``chosen``, up to ``budget`` indices.

    ``run`` is the folder of the detector that was trained on ``chosen``; None if there is none.
    """
    need = budget - len(chosen)
    if strategy == BALANCED:
        if run:
            counts = count_objects(paths, predict_boxes(paths, open_detector(run)))
            return [*chosen, *choose_balanced(vectors, counts, need, chosen)]
        strategy = "random"
    return [*chosen, *cover(strategy, vectors, need, chosen, seed=seed)]


def _hash(settings: Sequence[Any]) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def _read_points(folder: Path, digest: str) -> list[Point]:
    path, curve = folder / _POINTS, folder / _CURVE
    if not path.is_file():
        if curve.exists():
            raise UserError(f"'{curve}' is not of a simulation: choose another --output")
        return []
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        found, entries = content["digest"], list(content["points"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"'{path}' is not a file of points: remove it") from error
    if found != digest:
        raise UserError(f"'{path}' has other data or settings: choose another --output")
    return [parse_record(Point, entry, f"'{path}'") for entry in entries]


def _write_points(points: Sequence[Point], folder: Path, digest: str) -> None:
    content = {"digest": digest, "points": [*map(asdict, points)]}
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
        axes.plot(sizes, [np.mean(own) for own in values], label=name, **style)
        axes.fill_between(
            sizes, [*map(min, values)], [*map(max, values)], color=style["color"], alpha=0.15
        )
    axes.set_xlabel("images with labels")
    axes.set_ylabel("AP50 (%)")
    plotting.add_legend(figure, axes)
    return figure
