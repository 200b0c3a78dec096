# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Reconstruction losses of predictors without a network, on images held out from them.

They say how to read the loss of a pre-training: one that is not below ridge regression's has
learned little yet.
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from detectron2.config import CfgNode
from torch import Tensor
from tqdm import tqdm

from qbheat_det.core.errors import UserError
from qbheat_det.data import (
    DataError,
    ImageBatches,
    build_mapper,
    preserved_randomness,
    seed_place,
    with_views,
)
from qbheat_det.data.mappers import Mapper
from qbheat_det.modeling.contracts import get_views
from qbheat_det.modeling.pretrain import patchify

from .held_out_losses import HeldOutLosses
from .reconstruction_task import ReconstructionTask
from .streamed_ridge import RidgeSums, with_constant

BASELINES = ("zero", "mean image", "ridge")
PENALTIES = tuple(10 ** (power / 4) for power in range(-20, 17))
"""Relative penalties that ridge regression chooses from, see ``RidgeSums``."""
_HELD_EVERY = 5  # one in so many training images judges the penalties
_BATCH_PIXELS = 256 * 128**2


@dataclass
class BaselineReport:
    """What ``compute_baselines`` finds.

    Attributes:
        losses: by name of ``BASELINES``.
        penalties: by place of the visible quarter, those chosen for its patches.
        num_images: training images that could be read.
        num_rows: crops of these, and mirror images, that were fitted to.
        faults: what is wrong with images that were left out, by image.
    """

    losses: dict[str, HeldOutLosses] = field(
        default_factory=lambda: {name: HeldOutLosses() for name in BASELINES}
    )
    penalties: dict[str, list[float]] = field(default_factory=dict)
    num_images: int = 0
    num_rows: int = 0
    faults: dict[str, DataError] = field(default_factory=dict)


def compute_baselines(
    cfg: CfgNode,
    train: Sequence[dict[str, Any]],
    held_out: Sequence[dict[str, Any]],
    *,
    num_crops: int = 0,
    memory_gb: float = 2.0,
    progress: bool = False,
) -> BaselineReport:
    """Computes the losses of ``BASELINES`` on held-out images, seen as a model is evaluated.

    *Zero* predicts the mean of every normalised patch, or for raw pixels the training images'
    mean colour; *mean image* the mean over training images of what is to be predicted. *Ridge*
    predicts the pixels of every patch that counts from the visible quarter, averaged to 16 x 16
    pixels: one regression for each place of the quarter, with a penalty for each patch. A fifth
    of the training images choose the penalties, then all are fitted.

    Training images are largest centre squares, random crops, and all of these mirrored where
    ``INPUT.RANDOM_FLIP`` asks for it.

    Args:
        cfg: of QB-Heat.
        train: records with "file_name" and "image_id".
        held_out: the same, of other images; the four corners take turns over them.
        num_crops: random crops of each training image, drawn as in training; equal at each call.
        memory_gb: that the sums may take; where it is less than needed, images are read again.
        progress: show a bar with the time left on stderr.

    Raises:
        UserError: an image is in both sets, too few can be read, or the config is not sound.
    """
    task = ReconstructionTask.from_config(cfg)
    _check_apart(train, held_out)
    squares = build_mapper(cfg, is_train=False)
    mappers: list[Mapper] = [squares]
    mappers += [_SeededMapper(build_mapper(cfg, is_train=True), i) for i in range(num_crops)]
    workers = cfg.DATALOADER.NUM_WORKERS
    size = max(1, min(256, _BATCH_PIXELS // task.image_size**2))
    training = [
        ImageBatches(train, mapper=mapper, batch_size=size, num_workers=workers)
        for mapper in mappers
    ]
    views = with_views(held_out, get_views(cfg).values())
    evaluation = ImageBatches(views, mapper=squares, num_workers=workers)
    report = BaselineReport()
    shares = _count_shares(task, memory_gb)
    total = shares * (len(train) * len(mappers) + len(views))
    with tqdm(total=total, unit=" crops", disable=not progress) as bar:
        for share in range(shares):
            regressions = {
                place: _Regression(task, place, share=share, shares=shares) for place in task.places
            }
            colour = _gather(task, training, regressions, report, bar)
            bar.set_description("solving")
            for place, regression in regressions.items():
                report.penalties.setdefault(place, []).extend(regression.solve())
                report.num_rows = regression.num_rows
            _evaluate(task, evaluation, regressions, colour, report, bar)
    return report


class _Regression:
    """From the quarter at one place to a share of the patches."""

    def __init__(self, task: ReconstructionTask, place: str, *, share: int, shares: int) -> None:
        self._task = task
        self._place = place
        counted = task.find_counted(place)
        self.positions = counted.tensor_split(shares)[share]
        self.weight = len(self.positions) / len(counted)  # of the share in an image's loss
        self._sums, self._held = self._start(), self._start()
        self._coefficients: Tensor | None = None

    def _start(self) -> RidgeSums:
        return RidgeSums(
            num_inputs=self._task.num_inputs,
            num_groups=len(self.positions),
            group_size=self._task.num_outputs,
        )

    @property
    def num_rows(self) -> int:
        return self._sums.num_rows

    def add(self, images: Tensor, target: Tensor, held: Tensor) -> None:
        """Takes in images (N, 3, S, S), targets (N, L, P) and which of them choose penalties."""
        x, y = self._task.look(images, self._place), target[:, self.positions]
        for sums, rows in ((self._sums, ~held), (self._held, held)):
            sums.add(x[rows], y[rows])

    def solve(self) -> list[float]:
        """Fits, and returns the penalties of the patches."""
        penalties = self._sums.choose_penalties(self._held, PENALTIES)
        self._sums.merge(self._held)
        del self._held  # half of the memory, which the coefficients now take
        self._coefficients = self._sums.solve(penalties)
        return penalties.tolist()

    def predict(self, images: Tensor, colour: Tensor) -> dict[str, Tensor]:
        """Returns (N, positions, P) by baseline; ``colour`` (3,) is what zero stands for."""
        assert self._coefficients is not None
        mean = self._sums.mean_outputs
        rows = with_constant(self._task.look(images, self._place))
        zero = colour.repeat_interleave(self._task.num_outputs // len(colour))
        predicted = (
            zero.expand(len(images), *mean.shape),
            mean.expand(len(images), *mean.shape),
            (rows @ self._coefficients).transpose(0, 1),
        )
        return dict(zip(BASELINES, predicted, strict=True))


def _gather(
    task: ReconstructionTask,
    training: Sequence[ImageBatches],
    regressions: Mapping[str, _Regression],
    report: BaselineReport,
    bar: Any,
) -> Tensor:
    """Reads the training images; returns (3,), what "zero" predicts of each channel.

    Raises:
        UserError: fewer than two can be read.
    """
    bar.set_description("training images")
    colour = torch.zeros(len(task.pixel_mean), dtype=torch.float64)
    num_crops = 0
    ranks: dict[Any, int] = {}  # of the images that can be read
    for batches in training:
        for entries in batches:
            images = task.preprocess([entry["image"] for entry in entries])
            colour += images.double().mean(dim=(2, 3)).sum(dim=0)
            num_crops += len(images)
            # An image chooses penalties with all its crops or with none.
            held = [
                ranks.setdefault(entry["image_id"], len(ranks)) % _HELD_EVERY == 1
                for entry in entries
            ]
            images = task.with_mirrored(images)
            target = task.loss.find_target(patchify(images, task.patch_size))
            rows = torch.tensor(held).repeat(len(images) // len(held))
            for regression in regressions.values():
                regression.add(images, target, rows)
            bar.update(len(entries))
        report.faults.update(batches.skipped)
    report.num_images = len(ranks)
    if len(ranks) < 2:
        raise UserError(
            "baselines need two training images or more, to learn from some and to choose by the "
            f"others, but {len(ranks)} can be read{_name_one(report.faults)}"
        )
    return torch.zeros_like(colour) if task.loss.normalize_patches else colour / num_crops


def _evaluate(
    task: ReconstructionTask,
    evaluation: ImageBatches,
    regressions: Mapping[str, _Regression],
    colour: Tensor,
    report: BaselineReport,
    bar: Any,
) -> None:
    """Adds the losses of the patches that ``regressions`` predict.

    Raises:
        UserError: no image can be read.
    """
    bar.set_description("held-out images")
    for batch in evaluation:
        for place in sorted({entry["place"] for entry in batch}):
            entries = [entry for entry in batch if entry["place"] == place]
            images = task.preprocess([entry["image"] for entry in entries])
            images, partner = task.align(images, place)
            regression = regressions[partner]
            patches = patchify(images, task.patch_size)[:, regression.positions]
            all_counted = torch.zeros(patches.shape[:2], dtype=torch.bool)
            for name, predicted in regression.predict(images, colour).items():
                losses = task.loss(predicted, patches, all_counted) * regression.weight
                report.losses[name].add(entries, losses)
        bar.update(len(batch))
    report.faults.update(evaluation.skipped)
    if not report.losses["zero"].num_images:
        raise UserError(f"none of the held-out images can be read{_name_one(evaluation.skipped)}")


class _SeededMapper:
    """Draws what a mapper draws from the number of the pass and of the image alone."""

    def __init__(self, mapper: Mapper, number: int) -> None:
        self._mapper = mapper
        self._number = number

    def __call__(self, record: dict[str, Any]) -> dict[str, Any] | DataError | None:
        with preserved_randomness():
            # 1 keeps apart numbers that differ by zeros at the end.
            seed_place(self._number, int(record["image_id"]), 1)
            return self._mapper(record)


def _count_shares(task: ReconstructionTask, memory_gb: float) -> int:
    """Returns into how many shares the patches must fall for their sums to fit into memory.

    Raises:
        UserError: there is no memory to speak of.
    """
    if not memory_gb > 0:
        raise UserError(f"the memory for sums must be more than 0 GB, not {memory_gb:g}")
    counts = [len(task.find_counted(place)) for place in task.places]
    values = 2 * sum(counts) * task.num_outputs * (task.num_inputs + 1)
    return min(min(counts), math.ceil(values * 8 / (memory_gb * 1e9)))


def _check_apart(train: Sequence[dict[str, Any]], held_out: Sequence[dict[str, Any]]) -> None:
    known = {os.path.realpath(record["file_name"]) for record in train}
    for record in held_out:
        if os.path.realpath(record["file_name"]) in known:
            raise UserError(
                f"'{record['file_name']}' is both a training image and a held-out one: hold out "
                "images that no training image is a file of"
            )


def _name_one(faults: Mapping[str, DataError]) -> str:
    return f": {next(iter(faults.values())).message}" if faults else ""
