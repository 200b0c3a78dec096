# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Reconstruction losses of predictors without a network, on held-out images.

A pre-training whose loss is not below ridge regression's has learned little yet. Images are
(N, 3, S, S), patches (N, L, P).
"""

import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.modeling import build_backbone
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from qbheat_det.core.errors import UserError
from qbheat_det.data import DataError, ImageBatches, build_mapper, preserved_randomness, with_views
from qbheat_det.evaluation.build import mean_and_standard_error
from qbheat_det.modeling.contracts import get_views
from qbheat_det.modeling.pretrain import (
    QUADRANTS,
    QUADRANTS_OF,
    ReconstructionLoss,
    VisibleQuarters,
    find_map,
    patchify,
    visible_positions,
)

from .ridge import RidgeSums, with_constant

BASELINES = ("zero", "mean image", "ridge")
PENALTIES = tuple(10 ** (power / 4) for power in range(-20, 17))
"""Relative penalties that ridge regression chooses from, see ``RidgeSums``."""
_INPUT_SIZE = 16  # rows and columns to which the visible quarter is averaged
_HELD_EVERY = 5  # one in so many training images chooses the penalties
_BATCH_PIXELS = 256 * 128**2
_AXES = {"none": (), "horizontal": (-1,), "vertical": (-2,)}
_MIRRORED = {"horizontal": ("right", "left"), "vertical": ("bottom", "top")}  # in names of places


@dataclass(frozen=True)
class ReconstructionTask:
    """What a config of QB-Heat predicts from what: sizes in pixels, statistics (3, 1, 1)."""

    image_size: int
    patch_size: int
    visible: str
    flip: str
    loss: ReconstructionLoss
    pixel_mean: Tensor
    pixel_std: Tensor

    @classmethod
    def from_config(cls, cfg: CfgNode) -> "ReconstructionTask":
        """
        Raises:
            UserError: the config is not one of QB-Heat, or not valid.
        """
        node, size = cfg.MODEL.QB_HEAT, cfg.INPUT.PRETRAIN.SIZE
        for key, value, known in (
            ("MODEL.META_ARCHITECTURE", cfg.MODEL.META_ARCHITECTURE, ("QBHeat",)),
            ("MODEL.QB_HEAT.VISIBLE", node.VISIBLE, tuple(QUADRANTS_OF)),
            ("INPUT.RANDOM_FLIP", cfg.INPUT.RANDOM_FLIP, tuple(_AXES)),
        ):
            if value not in known:
                raise UserError(f"{key} is '{value}', but must be one of {', '.join(known)}")
        mean, std = cfg.MODEL.PIXEL_MEAN, cfg.MODEL.PIXEL_STD
        try:
            with preserved_randomness():  # of weights that are not used
                shapes = build_backbone(cfg).output_shape()
            return cls(
                image_size=size,
                patch_size=find_map(shapes, node.IN_FEATURE, size, multiple=4).stride,
                visible=node.VISIBLE,
                flip=cfg.INPUT.RANDOM_FLIP,
                loss=ReconstructionLoss(
                    positions=node.LOSS_ON, normalize_patches=node.NORM_PIXEL_LOSS
                ),
                pixel_mean=torch.tensor(mean).view(-1, 1, 1),
                pixel_std=torch.tensor(std).view(-1, 1, 1),
            )
        except ValueError as error:
            raise UserError(str(error)) from error

    @property
    def input_size(self) -> int:
        """Rows and columns of ``crop_inputs``."""
        return min(_INPUT_SIZE, self.image_size // 2)

    def preprocess(self, entries: Sequence[Mapping[str, Any]]) -> Tensor:
        """Returns the normalised images of mapped entries."""
        images = torch.stack([entry["image"] for entry in entries])
        return (images - self.pixel_mean) / self.pixel_std

    def crop_inputs(self, images: Tensor, place: str) -> Tensor:
        """Returns the visible quarter of all images, averaged to 16 x 16 pixels, as (N, 768)."""
        quarters = VisibleQuarters.at([place] * len(images), device=images.device)
        size = (self.input_size, self.input_size)
        return F.interpolate(quarters.crop(images), size, mode="area").flatten(1)

    def mirror(self, images: Tensor) -> Tensor:
        """Returns images flipped as training flips some."""
        return images.flip(_AXES[self.flip])

    def align(self, place: str) -> str:
        """Returns the place whose regression, with its images mirrored, serves ``place``.

        In a set with the mirror image of every image, what is fitted for a right corner is the
        mirror image of what is fitted for the left one.
        """
        return place.replace(*_MIRRORED[self.flip]) if self.flip != "none" else place

    def find_counted(self, place: str) -> Tensor:
        """Returns the indices of the patches that the loss counts."""
        grid = self.image_size // self.patch_size
        visible = visible_positions(grid)[QUADRANTS.index(place)].flatten()
        counted = torch.ones_like(visible) if self.loss.positions == "all" else ~visible
        return counted.nonzero().flatten()


class HeldOutLosses:
    """Losses by view and image; what is added to one twice is summed."""

    def __init__(self) -> None:
        self._values: dict[str, dict[Any, float]] = {view: {} for view in ("corner", "centre")}

    def add(self, entries: Sequence[Mapping[str, Any]], losses: Tensor) -> None:
        """Adds losses (N,) of dicts with "image_id" and "place"."""
        for entry, loss in zip(entries, losses.double().tolist(), strict=True):
            values = self._values["centre" if entry["place"] == "centre" else "corner"]
            values[entry["image_id"]] = values.get(entry["image_id"], 0.0) + loss

    def __len__(self) -> int:
        """Returns how many images were seen."""
        return max(map(len, self._values.values()))

    def summarise(self) -> dict[str, tuple[float, float]]:
        """Returns mean and standard error over images, by view and ("mean") over all views."""
        rows = {view: list(values.values()) for view, values in self._values.items() if values}
        by_image: dict[Any, list[float]] = {}
        for values in self._values.values():
            for image, loss in values.items():
                by_image.setdefault(image, []).append(loss)
        rows["mean"] = [statistics.fmean(losses) for losses in by_image.values()]
        return {name: mean_and_standard_error(row) for name, row in rows.items()}

    def minus(self, other: "HeldOutLosses") -> "HeldOutLosses":
        """Returns the differences of images that both have: they vary less than either."""
        difference = HeldOutLosses()
        for view, values in self._values.items():
            known = other._values[view]
            difference._values[view] = {
                image: loss - known[image] for image, loss in values.items() if image in known
            }
        return difference


@dataclass
class BaselineReport:
    """Losses by name of ``BASELINES``, penalties by place; ``num_rows`` counts mirror images."""

    losses: dict[str, HeldOutLosses] = field(
        default_factory=lambda: {name: HeldOutLosses() for name in BASELINES}
    )
    penalties: dict[str, list[float]] = field(default_factory=dict)
    num_images: int = 0
    num_rows: int = 0
    skipped: dict[str, DataError] = field(default_factory=dict)


def compute_baselines(
    cfg: CfgNode,
    train: Sequence[dict[str, Any]],
    held_out: Sequence[dict[str, Any]],
    *,
    progress: bool = False,
) -> BaselineReport:
    """Computes the losses of ``BASELINES`` on held-out images, viewed as a model is evaluated.

    *Zero* predicts the mean of every normalised patch, or the mean colour of raw pixels; *mean
    image* the mean target. *Ridge* predicts the pixels of every counted patch from the visible
    quarter, averaged to 16 x 16 pixels: one regression for each place of the quarter, with a
    penalty for each patch that a fifth of the training images choose.

    Raises:
        UserError: an image is in both sets, too few can be read, or the config is not valid.
    """
    task = ReconstructionTask.from_config(cfg)
    known = {os.path.realpath(record["file_name"]) for record in train}
    for record in held_out:
        if os.path.realpath(record["file_name"]) in known:
            raise UserError(f"'{record['file_name']}' is both a training and a held-out image")
    mapper, workers = build_mapper(cfg, is_train=False), cfg.DATALOADER.NUM_WORKERS
    size = max(1, min(256, _BATCH_PIXELS // task.image_size**2))
    training = ImageBatches(train, mapper=mapper, batch_size=size, num_workers=workers)
    views = with_views(held_out, get_views(cfg).values())
    evaluation = ImageBatches(views, mapper=mapper, num_workers=workers)
    report = BaselineReport()
    places = dict.fromkeys(map(task.align, QUADRANTS_OF[task.visible]))
    regressions = {place: _Regression(task, place) for place in places}
    with tqdm(total=len(train) + len(views), unit=" images", disable=not progress) as bar:
        colour = _fit(task, training, regressions, report, bar)
        _evaluate(task, evaluation, regressions, colour, report, bar)
    return report


class _Regression:
    def __init__(self, task: ReconstructionTask, place: str) -> None:
        self._task = task
        self._place = place
        self.positions = task.find_counted(place)
        self.sums, self._held = (
            RidgeSums(
                num_inputs=3 * task.input_size**2,
                num_groups=len(self.positions),
                group_size=3 * task.patch_size**2,
            )
            for _ in range(2)
        )
        self._coefficients: Tensor | None = None

    def add(self, images: Tensor, target: Tensor, held: Tensor) -> None:
        """Adds rows; ``held`` (N,) marks those that choose penalties."""
        x, y = self._task.crop_inputs(images, self._place), target[:, self.positions]
        for sums, rows in ((self.sums, ~held), (self._held, held)):
            sums.add(x[rows], y[rows])

    def solve(self) -> list[float]:
        """Fits, and returns the penalties of the patches."""
        penalties = self.sums.choose_penalties(self._held, PENALTIES)
        self.sums.merge(self._held)
        del self._held  # half of the memory, which the coefficients now take
        self._coefficients = self.sums.solve(penalties)
        return penalties.tolist()

    def predict(self, images: Tensor, colour: Tensor) -> dict[str, Tensor]:
        """Returns (N, positions, P) by baseline; ``colour`` (3,) is that of "zero"."""
        assert self._coefficients is not None
        mean = self.sums.mean_outputs
        rows = with_constant(self._task.crop_inputs(images, self._place))
        zero = colour.repeat_interleave(self._task.patch_size**2)
        predicted = (
            zero.expand(len(images), *mean.shape),
            mean.expand(len(images), *mean.shape),
            (rows @ self._coefficients).transpose(0, 1),
        )
        return dict(zip(BASELINES, predicted, strict=True))


def _fit(
    task: ReconstructionTask,
    training: ImageBatches,
    regressions: Mapping[str, _Regression],
    report: BaselineReport,
    bar: Any,
) -> Tensor:
    """Fits to the training images; returns (3,), what "zero" predicts of each channel."""
    colour = torch.zeros(3, dtype=torch.float64)
    number = 0
    for entries in training:
        images = task.preprocess(entries)
        colour += images.double().mean(dim=(2, 3)).sum(dim=0)
        # An image and its mirror image choose penalties together or not at all.
        held = torch.arange(number, number + len(images)) % _HELD_EVERY == 1
        number += len(images)
        if task.flip != "none":
            images, held = torch.cat([images, task.mirror(images)]), held.repeat(2)
        target = task.loss.find_target(patchify(images, task.patch_size))
        for regression in regressions.values():
            regression.add(images, target, held)
        bar.update(len(entries))
    report.skipped.update(training.skipped)
    report.num_images = number
    if number < 2:
        raise UserError(f"baselines need two readable training images, not {number}")
    for place, regression in regressions.items():
        report.penalties[place] = regression.solve()
        report.num_rows = regression.sums.num_rows
    return torch.zeros_like(colour) if task.loss.normalize_patches else colour / number


def _evaluate(
    task: ReconstructionTask,
    evaluation: ImageBatches,
    regressions: Mapping[str, _Regression],
    colour: Tensor,
    report: BaselineReport,
    bar: Any,
) -> None:
    for batch in evaluation:
        for place in sorted({entry["place"] for entry in batch}):
            entries = [entry for entry in batch if entry["place"] == place]
            images, partner = task.preprocess(entries), task.align(place)
            images = images if partner == place else task.mirror(images)
            regression = regressions[partner]
            patches = patchify(images, task.patch_size)[:, regression.positions]
            all_counted = torch.zeros(patches.shape[:2], dtype=torch.bool)
            for name, predicted in regression.predict(images, colour).items():
                losses = task.loss(predicted, patches, all_counted)
                report.losses[name].add(entries, losses)
        bar.update(len(batch))
    report.skipped.update(evaluation.skipped)
    if not len(report.losses["zero"]):
        raise UserError("none of the held-out images can be read")
