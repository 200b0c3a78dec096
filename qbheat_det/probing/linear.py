# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The linear probe on features that were worked out once: the optimum itself, for the best penalty.

Multinomial logistic regression on standardised features is convex: L-BFGS reaches its optimum, and
neither rate, batch nor length is left to choose. What decides is the L2 penalty, and with it the
order of encoders; each gets the one that does best on a part of the *training* images.
Standardisation stands for the BatchNorm without scale and offset of the QB-Heat paper's probe.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from qbheat_det.probing.features import split_by_class

L2_GRID = tuple(10.0 ** (power / 2) for power in range(0, -13, -1))
"""Penalties, from 1 down to 1e-6 in half decades."""

_HISTORY = 20
_LEAST_CURVATURE = 1e-12
_TRIAL_TOLERANCE = 1e-3  # of the gradient, where only an accuracy is asked for
_FLAT = 1e-6  # spread of a feature, relative to the largest spread, below which it is constant


@dataclass(frozen=True)
class Standardisation:
    """An affine map that gives each feature mean 0 and standard deviation 1 on training images.

    Features that are constant there become 0. Unlike BatchNorm's, there is no epsilon to favour
    features of large scale.

    Attributes:
        mean: (D,), float64.
        scale: what the difference to ``mean`` is multiplied by, (D,), float64.
    """

    mean: Tensor
    scale: Tensor

    @classmethod
    def of(cls, features: Tensor) -> "Standardisation":
        """Reads mean and scale off features (N, D)."""
        features = features.double()
        spread = features.std(dim=0, correction=0)
        varies = spread > _FLAT * spread.max()
        scale = torch.where(varies, 1 / spread.clamp(min=torch.finfo(spread.dtype).tiny), 0.0)
        return cls(features.mean(dim=0), scale)

    def __call__(self, features: Tensor) -> Tensor:
        """Applies it to (N, D), in float64."""
        return (features.double() - self.mean) * self.scale


@dataclass(frozen=True)
class LinearProbe:
    """A fitted classifier.

    Attributes:
        standardise: of the features.
        weight: (K, D + 1), float64; the last column is the bias.
        l2: the penalty it was fitted with.
        gradient: the largest entry of the gradient at the end; at the optimum 0.
    """

    standardise: Standardisation
    weight: Tensor
    l2: float
    gradient: float

    def __call__(self, features: Tensor) -> Tensor:
        """Returns the logits (N, K) of features (N, D)."""
        return _with_one(self.standardise(features)) @ self.weight.T


def fit_linear_probe(
    features: Tensor,
    labels: Tensor,
    *,
    num_classes: int,
    grid: Sequence[float] = L2_GRID,
    share: float = 0.2,
    seed: int = 0,
) -> tuple[LinearProbe, dict[str, Any]]:
    """Chooses the penalty on a part of the images, and then fits all of them with it.

    Args:
        features: (N, D).
        labels: (N,).
        num_classes: K.
        grid: penalties to choose from.
        share: of the images on which the penalty is chosen.
        seed: of the draw of these.

    Returns:
        The classifier; and "l2", "gradient" (its largest entry at the end) and "trials", the
        accuracy in per cent on the part set aside, by penalty as text.
    """
    fitted, aside = split_by_class(labels, share=share, seed=seed)
    tried, start = try_penalties(
        (features[fitted], labels[fitted]),
        (features[aside], labels[aside]),
        num_classes=num_classes,
        grid=grid,
    )
    best = max(tried, key=lambda l2: (tried[l2], l2))
    probe = fit_penalised(features, labels, num_classes=num_classes, l2=best, start=start[best])
    trials = {f"{l2:.2g}": accuracy for l2, accuracy in tried.items()}
    return probe, {"l2": best, "gradient": probe.gradient, "trials": trials}


def try_penalties(
    train: tuple[Tensor, Tensor],
    aside: tuple[Tensor, Tensor],
    *,
    num_classes: int,
    grid: Sequence[float] = L2_GRID,
) -> tuple[dict[float, float], dict[float, Tensor]]:
    """Returns the accuracy in per cent on images set aside, and weights, by penalty.

    The strongest penalty comes first, and each fit starts from that of the penalty before, which is
    close. None is left out for what the ones before gave: features of low rank are at the level of
    chance over several decades before they say anything.

    Args:
        train: features (T, D) and labels (T,) to fit.
        aside: features (N, D) and labels (N,) to classify.
        num_classes: K.
        grid: penalties.
    """
    (features, labels), (asked, truth) = train, aside
    found: dict[float, float] = {}
    weights: dict[float, Tensor] = {}
    weight: Tensor | None = None
    for l2 in sorted(grid, reverse=True):
        probe = fit_penalised(
            features,
            labels,
            num_classes=num_classes,
            l2=l2,
            start=weight,
            tolerance=_TRIAL_TOLERANCE,
            dtype=torch.float32,
        )
        weights[l2] = weight = probe.weight
        correct = (probe(asked).argmax(dim=1) == truth).double().mean() if len(truth) else 0.0
        found[l2] = 100 * float(correct)
    return found, weights


def fit_penalised(
    features: Tensor,
    labels: Tensor,
    *,
    num_classes: int,
    l2: float,
    start: Tensor | None = None,
    max_iterations: int = 500,
    tolerance: float = 1e-5,
    dtype: torch.dtype = torch.float64,
) -> LinearProbe:
    """Minimises mean cross-entropy + l2 / 2 · ‖W‖² over weights W and a bias that is not penalised.

    Features of a backbone have few directions of large variance, where L-BFGS alone takes
    thousands of steps. Along the principal axes, and each weight divided by the root of its
    curvature at the start, it takes tens; the optimum is the same.

    Args:
        features: (N, D), standardised here.
        labels: (N,).
        num_classes: K.
        l2: the penalty, positive.
        start: weights (K, D + 1) to begin from; 0 by default.
        max_iterations: of L-BFGS.
        tolerance: of the largest entry of the gradient, along the axes.
        dtype: to compute in.

    Raises:
        ValueError: there are no images, or the penalty is not positive.
    """
    if not len(labels) or not l2 > 0:
        raise ValueError(f"{len(labels)} images and a penalty of {l2}: both must be positive")
    standardise = Standardisation.of(features)
    inputs = standardise(features)
    _, axes = torch.linalg.eigh(inputs.T @ inputs / len(inputs))
    axes = torch.block_diag(axes, axes.new_ones(1, 1)).to(dtype)  # the bias stays as it is
    inputs = _with_one(inputs).to(dtype) @ axes
    penalty = torch.full_like(inputs[0], l2)
    penalty[-1] = 0.0
    begin = axes.new_zeros(num_classes, len(axes)) if start is None else start.to(dtype) @ axes
    scale = _root_of_curvature(inputs, begin, penalty).reciprocal()
    scaled = (begin / scale).requires_grad_()
    optimizer = torch.optim.LBFGS(
        [scaled],
        max_iter=max_iterations,
        max_eval=2 * max_iterations,
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

    with torch.enable_grad():
        optimizer.step(loss)
        loss()
    assert scaled.grad is not None
    gradient = float((scaled.grad / scale @ axes.T).abs().max())
    return LinearProbe(standardise, (scaled.detach() * scale @ axes.T).double(), l2, gradient)


def _root_of_curvature(inputs: Tensor, weight: Tensor, penalty: Tensor) -> Tensor:
    """Returns the root of the second derivative of the loss along each entry of W, (K, D + 1)."""
    shares = (inputs @ weight.T).softmax(dim=1)
    curvature = (shares * (1 - shares)).T @ inputs.square() / len(inputs) + penalty
    return curvature.clamp(min=_LEAST_CURVATURE).sqrt()


def _with_one(features: Tensor) -> Tensor:
    return torch.cat([features, features.new_ones(len(features), 1)], dim=1)
