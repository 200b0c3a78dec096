# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Reconstruction losses of three predictors without a network, to compare a model's loss with.

A model whose loss is not below that of ridge regression has learned little about images. The
baselines predict the target of each masked patch, which is the patch itself or, by default, the
normalized patch. They are computed from the results of an evaluation, without another pass over the
images.

- "zero" predicts 0. This is the mean of each normalized patch, or else the mean pixel
  (``MODEL.PIXEL_MEAN``).
- "mean" predicts the mean target of the image's visible patches, one value per channel.
- "ridge" predicts the targets by ridge regression from the pixels of the visible patches. The
  images are split into ``_NUM_FOLDS`` folds, and each is predicted by regression on the others.

Ridge regression reads 2 x 2 means of each visible patch, and predicts 4 x 4 means of each masked
patch, as finer details are hardly predictable by a linear model. Losses are those of the full
patches.
"""

import math
import statistics
import zlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from detectron2.utils import comm
from torch import Tensor
from torch.nn import functional as F

from qbheat_det.modeling.contracts import PATCHES, MaskedPatches

_MAX_IMAGES = 1024  # others are left out
_MAX_MASKS = 128  # ridge regression is computed for at most this number of different masks
_NUM_FOLDS = 5
_PENALTY = 3.0  # relative to the mean squared norm of the inputs of an image
_INPUT_SIDE = 2
_TARGET_SIDE = 4


@dataclass
class _Row:
    """The patches of an image at a low resolution.

    Attributes:
        inputs: means of the pixels, (L, I).
        targets: means of the targets, (L, 3 k k), channel by channel.
        details: mean squared difference of a patch's target from its means, (L,).
        views: masks (L,), True where visible, of each view that was evaluated.
    """

    inputs: Tensor
    targets: Tensor
    details: Tensor
    views: list[Tensor]


class ReconstructionBaselines:
    """Collects the images of an evaluation, and computes the losses of the baselines."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._rows: dict[str, _Row] = {}
        self._last = (math.inf, "")  # the order of the last image that can still be chosen

    def process(self, names: Sequence[str], outputs: Sequence[dict[str, Any]]) -> None:
        """Adds the images of a batch. ``names`` are unique, except for views of one image.

        Outputs without ``PATCHES`` are ignored.
        """
        for name, output in zip(names, outputs, strict=True):
            patches = output.get(PATCHES)
            if patches is None or _order(name) > self._last:
                continue
            if name not in self._rows:
                self._rows[name] = _summarize(patches)
            self._rows[name].views.append(patches.visible.cpu())
        if len(self._rows) > 2 * _MAX_IMAGES:
            self._rows = _choose(self._rows)
            self._last = max(map(_order, self._rows))

    def evaluate(self) -> dict[str, float]:
        """Gathers all images, and returns the mean loss over images of each baseline by name.

        On processes other than the main one, or without images, the dict is empty. If there are too
        few images for ridge regression, "ridge" is left out.
        """
        parts = comm.gather(_choose(self._rows), dst=0)
        rows: dict[str, _Row] = {}
        for part in parts:  # empty on other processes
            for name, row in part.items():
                if name in rows:
                    rows[name].views.extend(row.views)
                else:
                    rows[name] = row
        if not rows:
            return {}
        chosen = list(_choose(rows).values())
        zeros = []
        means = []
        for row in chosen:
            zeros.append([_loss(row, mask, torch.zeros(())) for mask in row.views])
            means.append([_loss(row, mask, _mean_target(row, mask)) for mask in row.views])
        losses = {"zero": _average(zeros), "mean": _average(means)}
        ridge = _average(_compute_ridge(chosen))
        if math.isfinite(ridge):
            losses["ridge"] = ridge
        return losses


def _summarize(patches: MaskedPatches) -> _Row:
    """Returns the row of an image, without views, on the CPU."""
    targets, details = _pool(patches.target, _TARGET_SIDE)
    inputs, _ = _pool(patches.pixels, _INPUT_SIDE)
    return _Row(inputs.cpu(), targets.cpu(), details.cpu(), [])


def _pool(patches: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """Averages patches (L, 3 p p) in each channel to ``side`` x ``side`` values, if p allows it.

    Returns the means (L, 3 k k), and the mean squared difference of each patch from them, (L,).
    """
    length = math.isqrt(patches.shape[1] // 3)
    side = math.gcd(length, side)
    images = patches.float().unflatten(1, (3, length, length))
    pooled = F.avg_pool2d(images, length // side).flatten(1)
    details = patches.float().square().mean(dim=1) - pooled.square().mean(dim=1)
    return pooled, details


def _choose(rows: dict[str, _Row]) -> dict[str, _Row]:
    """Returns the first ``_MAX_IMAGES`` images in the order of ``_order``."""
    names = sorted(rows, key=_order)
    return {name: rows[name] for name in names[:_MAX_IMAGES]}


def _order(name: str) -> tuple[float, str]:
    """Returns a sort key that mixes images, and does not depend on the number of processes."""
    return zlib.crc32(name.encode()), name


def _loss(row: _Row, visible: Tensor, predicted: Tensor) -> float:
    """Returns the loss of predicted means, which broadcast to those of all masked patches."""
    masked = ~visible
    errors = (predicted - row.targets[masked]).square().mean(dim=1) + row.details[masked]
    return float(errors.mean())


def _mean_target(row: _Row, visible: Tensor) -> Tensor:
    """Returns the mean target of each channel over the visible patches, as (3 k k,)."""
    channels = row.targets[visible].unflatten(1, (3, -1))
    num_values = channels.shape[2]
    return channels.mean(dim=(0, 2)).repeat_interleave(num_values)


def _compute_ridge(rows: Sequence[_Row]) -> list[list[float]]:
    """Returns the losses of ridge regression for the views of each image, (N, views).

    The images of a fold with the same mask are predicted together.
    """
    losses: list[list[float]] = [[] for _ in rows]
    if len(rows) < 2 * _NUM_FOLDS:
        return losses
    groups: dict[bytes, dict[int, list[int]]] = {}  # images by mask and fold
    masks: dict[bytes, Tensor] = {}
    for index, row in enumerate(rows):
        for mask in row.views:
            key = mask.numpy().tobytes()
            if key not in groups and len(groups) == _MAX_MASKS:
                continue
            masks[key] = mask
            by_fold = groups.setdefault(key, defaultdict(list))
            by_fold[index % _NUM_FOLDS].append(index)
    inputs = torch.stack([row.inputs for row in rows])  # (N, L, I)
    targets = torch.stack([row.targets for row in rows])  # (N, L, 3 k k)
    fold_of = torch.arange(len(rows)) % _NUM_FOLDS
    for key, by_fold in groups.items():
        visible = masks[key]
        x = inputs[:, visible].flatten(1)
        y = targets[:, ~visible]
        for fold, indices in by_fold.items():
            is_fitted = fold_of != fold
            predicted = fit_ridge(x[is_fitted], y[is_fitted].flatten(1), x[indices])
            for index, values in zip(indices, predicted, strict=True):
                losses[index].append(_loss(rows[index], visible, values.unflatten(0, y.shape[1:])))
    return losses


def fit_ridge(x: Tensor, y: Tensor, queries: Tensor) -> Tensor:
    """Fits ridge regression from x (N, D) to y (N, P), and predicts queries (Q, D) as (Q, P).

    The constant is not penalized. The penalty is ``_PENALTY`` times the mean squared norm of the
    centered inputs. It does not depend on N: like noise in the inputs of one image, it matters less
    with more images. The regression is solved in its dual form, because N is often below D.
    """
    mean_x = x.mean(dim=0)
    mean_y = y.mean(dim=0)
    centered = x - mean_x
    kernel = centered @ centered.T  # (N, N)
    penalty = _PENALTY * kernel.diagonal().mean().clamp(min=torch.finfo(x.dtype).tiny)
    similarities = centered @ (queries - mean_x).T  # (N, Q)
    weights = torch.linalg.solve(kernel + penalty * torch.eye(len(x)), similarities)
    return mean_y + weights.T @ (y - mean_y)


def _average(losses: Sequence[Sequence[float]]) -> float:
    """Returns the mean over images of the mean over their views; nan if there is none."""
    image_means = [statistics.fmean(views) for views in losses if views]
    if not image_means:
        return math.nan
    return statistics.fmean(image_means)
