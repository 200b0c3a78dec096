# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Runs probes by name on cached features, and fits the linear probe.

The linear probe is multinomial logistic regression on standardized features, fitted by L-BFGS. The
problem is convex, so its only choice is the L2 penalty, made on a part of the *training* images.
Standardization replaces the QB-Heat paper's BatchNorm without scale and offset.
"""

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from qbheat_det.core.errors import UserError
from qbheat_det.evaluation import measure_ranks, rank_true_class, score_neighbours

from .features import FrozenFeatures, channel_statistics, measure_accuracy, split_by_class
from .transformer import TransformerSettings, fit_transformer_probe

PROBES = ("knn", "linear", "tran-1", "tran-4")
"""The paper's probes and kNN; "tran-k" takes any k, and "tran-k:width" sets a width."""

_TRANSFORMER = re.compile(r"tran-([1-9]\d?)(?::([1-9]\d{0,4}))?")
_HEAD = 64  # width of an attention head; widths are multiples of it

L2_GRID = tuple(10.0 ** (power / 2) for power in range(0, -13, -1))
"""Penalties, from 1 down to 1e-6 in half decades."""

_MAX_ITERATIONS, _HISTORY = 500, 20  # of L-BFGS
_LEAST_CURVATURE = 1e-12
_TRIAL_TOLERANCE = 1e-3  # of the gradient in trials


@dataclass(frozen=True)
class ProbeSettings:
    """Settings of all probes."""

    num_classes: int
    k: int = 20  # number of nearest neighbors
    temperature: float = 0.07  # of the neighbors' votes
    transformer: TransformerSettings = field(default_factory=TransformerSettings)
    seed: int = 0
    device: str = "cpu"  # for tran-k

    def to_dict(self) -> dict[str, Any]:
        """Returns all settings that scores depend on."""
        transformer = dataclasses.asdict(self.transformer)
        del transformer["depth"]
        return {
            "num_classes": self.num_classes,
            "seed": self.seed,
            "knn": {"k": self.k, "temperature": self.temperature},
            "linear": {"l2_grid": list(L2_GRID)},
            "tran": transformer,
        }


def run_probe(
    name: str, train: FrozenFeatures, val: FrozenFeatures, *, settings: ProbeSettings
) -> tuple[dict[str, float], dict[str, Any]]:
    """Fits a probe on training images and classifies validation images.

    Returns the score, and the hyperparameters chosen on training images; see ``fit_linear_probe``
    and ``fit_transformer_probe``.
    """
    if name == "knn":
        voters, asked = (train.pooled, train.labels), (val.pooled, val.labels)
        score = score_neighbours(voters, asked, k=settings.k, temperature=settings.temperature)
        return score, {}
    if name == "linear":
        linear, chosen = fit_linear_probe(
            train.joined, train.labels, num_classes=settings.num_classes, seed=settings.seed
        )
        logits = linear(val.joined)
    else:
        transformer, chosen = fit_transformer_probe(
            train,
            num_classes=settings.num_classes,
            settings=dataclasses.replace(
                settings.transformer,
                depth=depth_of(name),
                width=width_of(name) or settings.transformer.width,
            ),
            seed=settings.seed,
            device=settings.device,
        )
        logits = transformer(val)
    return measure_ranks(rank_true_class(logits, val.labels)), chosen


def check_probes(names: Sequence[str]) -> None:
    """Raises a ``UserError`` unless all names are probes with valid widths."""
    unknown = [name for name in names if name not in ("knn", "linear") and not depth_of(name)]
    if unknown or not names:
        given = ", ".join(map(repr, unknown)) or "none"
        raise UserError(f"probes are {', '.join(PROBES)}, not {given}")
    uneven = [name for name in names if width_of(name) % _HEAD]
    if uneven:
        raise UserError(f"widths of tran-k are multiples of {_HEAD}, unlike that of '{uneven[0]}'")


def depth_of(name: str) -> int:
    """Returns k of "tran-k", or 0 for another probe."""
    found = _TRANSFORMER.fullmatch(name)
    return int(found[1]) if found else 0


def width_of(name: str) -> int:
    """Returns the width of "tran-k:width", or 0 if the name has none."""
    found = _TRANSFORMER.fullmatch(name)
    return int(found[2] or 0) if found else 0


@dataclass(frozen=True)
class LinearProbe:
    """A linear classifier of standardized features (N, D), in float64.

    ``mean`` and ``scale`` (D,) come from the training images. The last column of ``weight``
    (K, D + 1) is the bias. ``l2`` is the penalty, ``gradient`` the largest entry of the final
    gradient.
    """

    mean: Tensor
    scale: Tensor
    weight: Tensor
    l2: float
    gradient: float

    def __call__(self, features: Tensor) -> Tensor:
        """Returns the logits (N, K) of features (N, D)."""
        return _with_one((features.double() - self.mean) * self.scale) @ self.weight.T


def fit_linear_probe(
    features: Tensor, labels: Tensor, *, num_classes: int, seed: int = 0
) -> tuple[LinearProbe, dict[str, Any]]:
    """Chooses the penalty on held-out images of the features (N, D), then fits all images.

    Returns the classifier, and a dict with "l2", "gradient" (see ``LinearProbe``) and "trials",
    the held-out accuracy in percent by penalty as text.
    """
    fitted, held_out = split_by_class(labels, seed=seed)
    trials: dict[float, float] = {}
    weights: dict[float, Tensor] = {}
    weight: Tensor | None = None
    for l2 in L2_GRID:  # each fit starts from the previous solution
        trial = fit_penalised(
            features[fitted],
            labels[fitted],
            num_classes=num_classes,
            l2=l2,
            start=weight,
            tolerance=_TRIAL_TOLERANCE,
            dtype=torch.float32,
        )
        weights[l2] = weight = trial.weight
        trials[l2] = measure_accuracy(trial(features[held_out]), labels[held_out])
    best = max(trials, key=lambda l2: (trials[l2], l2))
    probe = fit_penalised(features, labels, num_classes=num_classes, l2=best, start=weights[best])
    named = {f"{l2:.2g}": accuracy for l2, accuracy in trials.items()}
    return probe, {"l2": best, "gradient": probe.gradient, "trials": named}


def fit_penalised(
    features: Tensor,
    labels: Tensor,
    *,
    num_classes: int,
    l2: float,
    start: Tensor | None = None,
    tolerance: float = 1e-5,
    dtype: torch.dtype = torch.float64,
) -> LinearProbe:
    """Minimizes mean cross-entropy + l2 / 2 · ‖W‖² over weights W and an unpenalized bias.

    Preconditioning by the principal axes and the initial curvature reduces L-BFGS from thousands of
    steps to tens; the optimum is the same.

    Args:
        features: (N, D), standardized by this function.
        labels: (N,).
        num_classes: K.
        l2: the penalty.
        start: initial weights (K, D + 1); None starts from 0.
        tolerance: of the largest entry of the gradient along the axes.
        dtype: of the computation.
    """
    if not len(labels) or not l2 > 0:
        raise ValueError(f"{len(labels)} images and a penalty of {l2}: both must be positive")
    mean, factor = channel_statistics(features)
    inputs = (features.double() - mean) * factor
    _, axes = torch.linalg.eigh(inputs.T @ inputs / len(inputs))
    axes = torch.block_diag(axes, axes.new_ones(1, 1)).to(dtype)  # without a rotation of the bias
    inputs = _with_one(inputs).to(dtype) @ axes
    penalty = torch.full_like(inputs[0], l2)
    penalty[-1] = 0.0
    begin = axes.new_zeros(num_classes, len(axes)) if start is None else start.to(dtype) @ axes
    shares = (inputs @ begin.T).softmax(dim=1)
    curvature = (shares * (1 - shares)).T @ inputs.square() / len(inputs) + penalty  # (K, D + 1)
    scale = curvature.clamp(min=_LEAST_CURVATURE).rsqrt()
    scaled = (begin / scale).requires_grad_()
    optimizer = torch.optim.LBFGS(
        [scaled],
        max_iter=_MAX_ITERATIONS,
        max_eval=2 * _MAX_ITERATIONS,
        tolerance_grad=tolerance,
        tolerance_change=0.0,
        history_size=_HISTORY,
        line_search_fn="strong_wolfe",
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        weight = scaled * scale
        value = F.cross_entropy(inputs @ weight.T, labels) + (weight.square() @ penalty).sum() / 2
        value.backward()
        return value

    optimizer.step(loss)
    loss()
    assert scaled.grad is not None
    gradient = float((scaled.grad / scale @ axes.T).abs().max())
    weight = (scaled.detach() * scale @ axes.T).double()
    return LinearProbe(mean, factor, weight, l2, gradient)


def _with_one(features: Tensor) -> Tensor:
    return torch.cat([features, features.new_ones(len(features), 1)], dim=1)
