# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Reconstruction losses of predictors without a network, on held-out images.

A pre-training whose loss is not below ridge regression's has learned little yet. Images are
(N, 3, S, S), patches (N, L, P).
"""

import os
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
from qbheat_det.core.seeding import preserved_randomness
from qbheat_det.data import DataError, ImageBatches, build_mapper, with_views
from qbheat_det.evaluation import HeldOutLossEvaluator
from qbheat_det.modeling.contracts import get_views, normalise_pixels
from qbheat_det.modeling.pretrain import (
    QUADRANTS,
    QUADRANTS_OF,
    ReconstructionLoss,
    VisibleQuarters,
    patchify,
    visible_positions,
)
from qbheat_det.modeling.pretrain.base import find_map

BASELINES = ("zero", "mean image", "ridge")
PENALTIES = tuple(10 ** (power / 4) for power in range(-20, 17))
"""Relative penalties that ridge regression chooses from, see ``RidgeRegression``."""
_INPUT_SIZE = 16  # rows and columns to which the visible quarter is averaged
_HELD_EVERY = 5  # one in so many training images chooses the penalties
_BATCH_PIXELS = 256 * 128**2
_AXES = {"none": (), "horizontal": (-1,), "vertical": (-2,)}


@dataclass(frozen=True)
class ReconstructionTask:
    """What a config of QB-Heat predicts from what: sizes and statistics in pixels."""

    image_size: int
    patch_size: int
    visible: str
    flip: str
    loss: ReconstructionLoss
    pixel_mean: Sequence[float]
    pixel_std: Sequence[float]

    @classmethod
    def from_config(cls, cfg: CfgNode) -> "ReconstructionTask":
        """Raises a ``UserError`` if the config is not one of QB-Heat, or not valid."""
        node, size = cfg.MODEL.QB_HEAT, cfg.INPUT.PRETRAIN.SIZE
        for key, value, known in (
            ("MODEL.META_ARCHITECTURE", cfg.MODEL.META_ARCHITECTURE, ("QBHeat",)),
            ("MODEL.QB_HEAT.VISIBLE", node.VISIBLE, tuple(QUADRANTS_OF)),
            ("INPUT.RANDOM_FLIP", cfg.INPUT.RANDOM_FLIP, tuple(_AXES)),
        ):
            if value not in known:
                raise UserError(f"{key} is '{value}', but must be one of {', '.join(known)}")
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
                pixel_mean=cfg.MODEL.PIXEL_MEAN,
                pixel_std=cfg.MODEL.PIXEL_STD,
            )
        except ValueError as error:
            raise UserError(str(error)) from error

    def preprocess(self, entries: Sequence[Mapping[str, Any]]) -> Tensor:
        """Returns the normalised images of mapped entries."""
        images = torch.stack([entry["image"] for entry in entries])
        return normalise_pixels(images, self.pixel_mean, self.pixel_std)

    def crop_inputs(self, images: Tensor, place: str) -> Tensor:
        """Returns the visible quarter of all images, averaged to 16 x 16 pixels, as (N, 768)."""
        quarters = VisibleQuarters.at([place] * len(images), device=images.device)
        side = min(_INPUT_SIZE, self.image_size // 2)
        return F.interpolate(quarters.crop(images), (side, side), mode="area").flatten(1)

    def find_counted(self, place: str) -> Tensor:
        """Returns the indices of the patches that the loss counts."""
        grid = self.image_size // self.patch_size
        visible = visible_positions(grid)[QUADRANTS.index(place)].flatten()
        counted = torch.ones_like(visible) if self.loss.positions == "all" else ~visible
        return counted.nonzero().flatten()


class RidgeRegression:
    """Ridge regression from sums over rows, so that the rows may be a stream of any length.

    Rows are x of D inputs and y of G groups of P outputs; the constant is not penalised. With x
    centred, the weights for a penalty λ are V (Λ + λ)⁻¹ Vᵀ Σxyᵀ, where V Λ Vᵀ = Σxxᵀ is decomposed
    once for all λ. Penalties are relative: 1 is the mean eigenvalue Λ, so that one value means the
    same for any number of rows and any scale of x. All in float64.
    """

    def __init__(self, *, num_inputs: int, num_groups: int, group_size: int) -> None:
        size = num_inputs + 1  # rows are inputs and the constant 1; columns these and the outputs
        starts = range(size, size + num_groups * group_size, group_size)
        self._inputs, self._groups = slice(num_inputs), [slice(i, i + group_size) for i in starts]
        self._sums, self._held = (
            torch.zeros(size, size + num_groups * group_size, dtype=torch.float64) for _ in range(2)
        )
        self._coefficients: Tensor | None = None

    @property
    def mean_outputs(self) -> Tensor:
        """(G, P)."""
        means = self._sums[-1] / self._sums[-1, self._inputs.stop]
        return torch.stack([means[group] for group in self._groups])

    def add(self, x: Tensor, y: Tensor, held: Tensor) -> None:
        """Adds rows x (N, D) and y (N, G, P); ``held`` (N,) marks those that choose penalties."""
        rows = _with_constant(x)
        columns = torch.cat([rows, y.flatten(1).double()], dim=1)
        for sums, chosen in ((self._sums, ~held), (self._held, held)):
            sums.addmm_(rows[chosen].T, columns[chosen])

    def solve(self, penalties: Sequence[float]) -> list[float]:
        """Fits all rows; returns the penalty of each group, with the least error on held rows."""
        chosen = self._choose_penalties(penalties)
        self._sums += self._held
        del self._held  # half of the memory, which the coefficients now take
        values, vectors, means = self._decompose()
        coefficients = torch.empty(len(self._sums), len(means), dtype=means.dtype)
        for group, penalty in zip(self._groups, chosen, strict=True):
            fitted = vectors.T @ self._centre(self._sums, means, group)
            weights = vectors @ (fitted / (values + penalty * _scale(values))[:, None])
            coefficients[self._inputs, group] = weights
            coefficients[-1, group] = means[group] - means[self._inputs] @ weights
        self._coefficients = coefficients[:, len(self._sums) :]
        return chosen

    def predict(self, x: Tensor) -> Tensor:
        """Returns (N, G, P)."""
        assert self._coefficients is not None
        return (_with_constant(x) @ self._coefficients).unflatten(1, (len(self._groups), -1))

    def _choose_penalties(self, penalties: Sequence[float]) -> list[float]:
        values, vectors, means = self._decompose()
        grid = torch.tensor(penalties, dtype=torch.float64)
        shrinkage = 1 / (values[:, None] + grid * _scale(values))  # (D, penalties)
        held_xx = vectors.T @ self._centre(self._held, means, self._inputs) @ vectors
        chosen = []
        for group in self._groups:
            fitted = vectors.T @ self._centre(self._sums, means, group)
            held_xy = vectors.T @ self._centre(self._held, means, group)
            linear = (fitted * held_xy).sum(dim=1)
            quadratic = (fitted @ fitted.T) * held_xx
            # By how much the squared error is below that of the mean, for each penalty.
            gain = 2 * linear @ shrinkage - (shrinkage * (quadratic @ shrinkage)).sum(dim=0)
            chosen.append(float(grid[gain.argmax()]))
        return chosen

    def _decompose(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns eigenvalues (D,), eigenvectors (D, D) of Σxxᵀ, and the means of all columns."""
        means = self._sums[-1] / self._sums[-1, self._inputs.stop]
        values, vectors = torch.linalg.eigh(self._centre(self._sums, means, self._inputs))
        return values.clamp(min=0), vectors, means  # rounding can make them negative

    def _centre(self, sums: Tensor, means: Tensor, columns: slice) -> Tensor:
        """Returns the sum of (x - its mean)(z - its mean)ᵀ for columns z."""
        mean_x, sum_x = means[self._inputs], sums[self._inputs, self._inputs.stop]
        left = sums[self._inputs, columns] - torch.outer(mean_x, sums[-1, columns])
        return left - torch.outer(sum_x - mean_x * sums[-1, self._inputs.stop], means[columns])


def _with_constant(x: Tensor) -> Tensor:
    """From rows (N, D) to (N, D + 1), float64, the last column 1."""
    return torch.cat([x.double(), torch.ones(len(x), 1, dtype=torch.float64)], dim=1)


def _scale(values: Tensor) -> float:
    return float(values.mean()) or 1.0  # inputs that never change are left alone by any penalty


@dataclass
class BaselineReport:
    """Metrics of ``HeldOutLossEvaluator`` by name of ``BASELINES``, and penalties by place."""

    losses: dict[str, dict[str, float]] = field(default_factory=dict)
    penalties: dict[str, list[float]] = field(default_factory=dict)
    num_images: int = 0
    num_held_out: int = 0
    skipped: dict[str, DataError] = field(default_factory=dict)


def compute_baselines(
    cfg: CfgNode,
    train: Sequence[dict[str, Any]],
    held_out: Sequence[dict[str, Any]],
    *,
    progress: bool = False,
) -> BaselineReport:
    """Computes the losses of ``BASELINES`` on held-out images, viewed as a model is evaluated.

    *Zero* predicts the mean of every normalised patch, or ``MODEL.PIXEL_MEAN`` for raw pixels;
    *mean image* the mean target. *Ridge* predicts the pixels of every counted patch from the
    visible quarter, averaged to 16 x 16 pixels: one regression for each place of the quarter, with
    a penalty for each patch that a fifth of the training images choose. Raises a ``UserError`` if
    an image is in both sets, too few can be read, or the config is not valid.
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
    regressions = {
        place: RidgeRegression(
            num_inputs=task.crop_inputs(torch.zeros(1, 3, *2 * [task.image_size]), place).numel(),
            num_groups=len(task.find_counted(place)),
            group_size=3 * task.patch_size**2,
        )
        for place in QUADRANTS_OF[task.visible]
    }
    with tqdm(total=len(train) + len(views), unit=" images", disable=not progress) as bar:
        _fit(task, training, regressions, report, bar)
        _evaluate(task, evaluation, regressions, report, bar)
    return report


def _fit(
    task: ReconstructionTask,
    training: ImageBatches,
    regressions: Mapping[str, RidgeRegression],
    report: BaselineReport,
    bar: Any,
) -> None:
    number = 0
    for entries in training:
        images = task.preprocess(entries)
        # An image and its mirror image choose penalties together or not at all.
        held = torch.arange(number, number + len(images)) % _HELD_EVERY == 1
        number += len(images)
        if task.flip != "none":
            images, held = torch.cat([images, images.flip(_AXES[task.flip])]), held.repeat(2)
        target = task.loss.find_target(patchify(images, task.patch_size))
        for place, regression in regressions.items():
            inputs = task.crop_inputs(images, place)
            regression.add(inputs, target[:, task.find_counted(place)], held)
        bar.update(len(entries))
    report.skipped.update(training.skipped)
    report.num_images = number
    if number < 2:
        raise UserError(f"baselines need two readable training images, not {number}")
    for place, regression in regressions.items():
        report.penalties[place] = regression.solve(PENALTIES)


def _evaluate(
    task: ReconstructionTask,
    evaluation: ImageBatches,
    regressions: Mapping[str, RidgeRegression],
    report: BaselineReport,
    bar: Any,
) -> None:
    evaluators = {name: HeldOutLossEvaluator(name) for name in BASELINES}
    seen = set()
    for batch in evaluation:
        for place in sorted({entry["place"] for entry in batch}):
            entries = [entry for entry in batch if entry["place"] == place]
            images, regression = task.preprocess(entries), regressions[place]
            patches = patchify(images, task.patch_size)[:, task.find_counted(place)]
            all_counted = torch.zeros(patches.shape[:2], dtype=torch.bool)
            zero, mean = torch.zeros(()), regression.mean_outputs
            ridge = regression.predict(task.crop_inputs(images, place))
            for name, predicted in zip(BASELINES, (zero, mean, ridge), strict=True):
                losses = task.loss(predicted.expand_as(patches), patches, all_counted)
                outputs = [{"place": place, "loss_reconstruction": loss} for loss in losses]
                evaluators[name].process(entries, outputs)
            seen |= {entry["image_id"] for entry in entries}
        bar.update(len(batch))
    report.skipped.update(evaluation.skipped)
    report.num_held_out = len(seen)
    if not seen:
        raise UserError("none of the held-out images can be read")
    for name, evaluator in evaluators.items():
        report.losses[name] = evaluator.evaluate()["reconstruction"]
