# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Simulates rounds of labelling on a labelled data set: AP50 over the number of labelled images."""

import itertools
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from qbheat_det.analysis import plotting
from qbheat_det.core.errors import UserError
from qbheat_det.core.files import parse_record, write_atomically
from qbheat_det.data import open_source, read_annotations
from qbheat_det.data.datasets.coco_file import CocoFile
from qbheat_det.engine import RunFlags, Trainer, build_config, setup

from .coverage import unit_vectors
from .embeddings import embed_images
from .selection import COVERING, choose_uncertain, predict_boxes

_CONFIG = "custom/cached_retinanet_285M_probe.yaml"
_POINTS, _CURVE = "points.json", "curve.svg"


@dataclass(frozen=True)
class Point:
    """Validation results, in percent, of a detector trained on the images of a strategy."""

    strategy: str
    seed: int
    images: int
    boxes: int
    ap: float
    ap50: float


@dataclass(frozen=True)
class _Pool:
    """A labelled data set whose labels a strategy sees only for the images it chose."""

    file: CocoFile
    paths: list[str]
    vectors: Tensor

    def write_labels(self, chosen: Sequence[int], path: Path) -> int:
        """Writes the COCO file of some images; returns its number of boxes."""
        lists = self.file.keep([str(self.file.images[i]["file_name"]) for i in chosen])
        write_atomically(path, json.dumps(lists).encode())
        return len(lists["annotations"])


def simulate(
    data: str,
    budgets: Sequence[int],
    output: str | Path,
    *,
    val: str = "",
    images: str = "",
    strategies: Sequence[str] = ("random", "typiclust", "uncertainty"),
    seeds: Sequence[int] = (1, 2, 3),
    encoder: str = "distill/285M",
    opts: Sequence[str] = (),
) -> list[Point]:
    """Trains a detector for each strategy, seed and number of images.

    A strategy starts without labels and adds images up to each budget. "random" is the baseline;
    "uncertainty" starts with "typiclust". The detector is RetinaNet's decoder on the frozen
    encoder, from cached features. A second call continues an interrupted simulation.

    Args:
        data: data set with boxes, in any format of ``--data``.
        budgets: numbers of training images.
        output: folder for ``points.json``, ``curve.svg`` and the last run.
        val: validation data; by default the validation part of ``data``.
        images: folder of the images of a COCO json, if they are not beside it.
        strategies: "random" or strategies of ``select``.
        seeds: seeds of selection and training.
        encoder: weights of the frozen encoder.
        opts: overrides of the training config, keys and values alternating.

    Raises:
        UserError: the data have no boxes or no validation part, a strategy is unknown, or a budget
            does not fit.
    """
    opened = open_source(data, images)
    if opened.kind == "classes" or not (val or opened.val):
        raise UserError(f"'{data}' has no boxes or no validation part: add --val")
    if unknown := {*strategies} - {"random", "uncertainty", *COVERING}:
        raise UserError(f"there is no strategy '{unknown.pop()}'")
    budgets = sorted(budgets)
    file = read_annotations(opened.train)
    if not budgets or budgets[0] < 1 or budgets[-1] > len(file.images):
        raise UserError(f"budgets are {budgets}, but '{data}' has {len(file.images)} images")
    paths = [os.path.join(file.image_root, image["file_name"]) for image in file.images]
    embedded = embed_images(paths, encoder)
    if embedded.unreadable:
        raise UserError(f"cannot read the image '{next(iter(embedded.unreadable))}'")
    pool = _Pool(file, paths, unit_vectors(embedded.vectors))
    folder = Path(output)
    points = _read_points(folder / _POINTS)
    for seed, strategy in itertools.product(seeds, strategies):
        chosen: list[int] = []
        for budget in budgets:
            chosen = _choose(pool, strategy, budget, chosen, seed, folder / "run")
            done = {(one.strategy, one.seed, one.images) for one in points}
            is_needed = strategy == "uncertainty" and budget < budgets[-1]
            if (strategy, seed, budget) in done and not is_needed:
                continue
            labels = folder / "labels.json"
            num_boxes = pool.write_labels(chosen, labels)
            flags = RunFlags(
                config_file=_CONFIG,
                data=str(labels),
                images=file.image_root,
                val=val or data,
                val_images=images,
                weights=encoder,
                output=str(folder / "run"),
                opts=["SEED", str(seed), *opts],
            )
            found = train_afresh(flags)
            # Detectron2 reports nan if there is no detection.
            metrics = (round(float(np.nan_to_num(found[key])), 2) for key in ("AP", "AP50"))
            if (strategy, seed, budget) not in done:
                points.append(Point(strategy, seed, budget, num_boxes, *metrics))
            write_atomically(folder / _POINTS, json.dumps([*map(asdict, points)]).encode())
            chart = plotting.chart_image(plot_points(points))
            write_atomically(folder / _CURVE, chart.content)
    return points


def _choose(
    pool: _Pool, strategy: str, budget: int, chosen: list[int], seed: int, run: Path
) -> list[int]:
    """Returns the chosen images and further ones, up to the budget."""
    need = budget - len(chosen)
    if strategy == "random":
        order = np.random.default_rng(seed).permutation(len(pool.paths))
        return [int(i) for i in order[:budget]]
    if strategy == "uncertainty" and chosen:
        values = predict_boxes(pool.paths, str(run), None).uncertainties
        values[chosen] = -torch.inf
        return [*chosen, *choose_uncertain(pool.vectors, values, need, chosen)]
    name = "typiclust" if strategy == "uncertainty" else strategy
    settings = {} if name == "k_center" else {"seed": seed}
    return [*chosen, *COVERING[name](pool.vectors, need, chosen, **settings)]


def train_afresh(flags: RunFlags) -> dict[str, float]:
    """Trains in a folder of its own; returns the metrics of boxes."""
    shutil.rmtree(flags.output, ignore_errors=True)
    cfg = build_config(flags)
    setup(cfg, flags)
    trainer = Trainer(cfg)
    trainer.resume_or_load(resume=False)
    results: dict[str, float] = trainer.train()["bbox"]
    return results


def _read_points(path: Path) -> list[Point]:
    if not path.is_file():
        return []
    try:
        entries = list(json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise UserError(f"'{path}' is not a file of points: remove it") from error
    return [parse_record(Point, entry, f"'{path}'") for entry in entries]


@plotting.themed
def plot_points(points: Sequence[Point]) -> Figure:
    """Draws the mean AP50 of each strategy over the number of images, and the range of seeds."""
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
