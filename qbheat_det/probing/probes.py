# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The linear and tran-k probes: classifiers on cached features.

The linear probe is multinomial logistic regression on standardized features, fitted by L-BFGS. The
problem is convex, so the L2 penalty is its only hyperparameter. Standardization replaces the
QB-Heat paper's BatchNorm without scale and offset.

The decoder, AdamW, weight decay and label smoothing of tran-k follow Table 11 of the QB-Heat paper.
It differs from the paper in these points:

- Images are not augmented, because feature maps are cached.
- Dropout and the number of epochs are selected for each encoder.
- The learning rate is constant, and weights are averaged over about one epoch. So one training run
  tries all numbers of epochs.
- Feature maps are whitened, for faster convergence.

Hyperparameters of both probes are selected on held-out *training* images.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from detectron2.layers import ShapeSpec
from torch import Tensor
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from qbheat_det.core.seeding import preserved_randomness
from qbheat_det.modeling.classification import TransformerDecoder

from .features import FrozenFeatures, channel_statistics, measure_accuracy, split_by_class

L2_GRID = tuple(10.0 ** (power / 2) for power in range(0, -13, -1))
"""L2 penalties, from 1 down to 1e-6 in half decades."""

_MAX_ITERATIONS = 500  # of L-BFGS
_HISTORY_SIZE = 20  # of L-BFGS
_MIN_CURVATURE = 1e-12
_TRIAL_TOLERANCE = 1e-3  # tolerance of the gradient in trials
_MAP = "map"
_CHUNK = 256  # largest number of images in a batch of inference
_VARIANCE_FLOOR = 1e-2  # added to the variances of principal components, whose mean is 1


@dataclass(frozen=True)
class LinearProbe:
    """A linear classifier on standardized features (N, D), in float64.

    Attributes:
        mean: mean (D,) of each feature over the training images.
        scale: 1 / std (D,) of each feature over the training images.
        weight: weights (K, D + 1). The last column is the bias.
        l2: the L2 penalty.
        gradient: largest absolute entry of the gradient at the end of the fit.
    """

    mean: Tensor
    scale: Tensor
    weight: Tensor
    l2: float
    gradient: float

    def __call__(self, features: Tensor) -> Tensor:
        """Returns the logits (N, K) of features (N, D)."""
        standardized = (features.double() - self.mean) * self.scale
        return _with_one(standardized) @ self.weight.T


def fit_linear_probe(
    features: Tensor, labels: Tensor, *, num_classes: int, seed: int = 0
) -> tuple[LinearProbe, dict[str, Any]]:
    """Selects the penalty on held-out images, then fits a classifier to all features (N, D).

    Returns the classifier, and a dict with these keys:

    - "l2": the selected penalty.
    - "gradient": largest absolute entry of the gradient at the end of the fit.
    - "trials": held-out accuracy in percent, by penalty as a string.
    """
    fitted, held_out = split_by_class(labels, seed=seed)
    accuracies: dict[float, float] = {}  # by penalty
    weights: dict[float, Tensor] = {}  # by penalty
    previous_weight: Tensor | None = None  # each fit starts from the previous solution
    for l2 in L2_GRID:
        trial = fit_penalised(
            features[fitted],
            labels[fitted],
            num_classes=num_classes,
            l2=l2,
            start=previous_weight,
            tolerance=_TRIAL_TOLERANCE,
            dtype=torch.float32,
        )
        accuracies[l2] = measure_accuracy(trial(features[held_out]), labels[held_out])
        weights[l2] = trial.weight
        previous_weight = trial.weight
    # Among equal accuracies, the larger penalty is selected.
    best = max(accuracies, key=lambda l2: (accuracies[l2], l2))
    probe = fit_penalised(features, labels, num_classes=num_classes, l2=best, start=weights[best])
    return probe, {
        "l2": best,
        "gradient": probe.gradient,
        "trials": {f"{l2:.2g}": accuracy for l2, accuracy in accuracies.items()},
    }


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

    The weights are rotated to the principal components of the features, and scaled by the curvature
    of the loss at the start. This preconditioning reduces the steps of L-BFGS from thousands to
    tens, and does not change the optimum.

    Args:
        features: features (N, D), which are standardized here.
        labels: labels (N,).
        num_classes: number of classes K.
        l2: the penalty.
        start: initial weights (K, D + 1); None for zeros.
        tolerance: L-BFGS stops if no absolute entry of the preconditioned gradient is larger.
        dtype: type of the computation.
    """
    mean, inverse_std = channel_statistics(features)
    standardized = (features.double() - mean) * inverse_std  # (N, D)
    _, components = torch.linalg.eigh(standardized.T @ standardized / len(standardized))  # (D, D)
    # (D + 1, D + 1). The last row and column leave the bias as it is.
    rotation = torch.block_diag(components, components.new_ones(1, 1)).to(dtype)
    inputs = _with_one(standardized).to(dtype) @ rotation  # (N, D + 1)
    penalty = torch.full_like(inputs[0], l2)
    penalty[-1] = 0.0  # of the bias
    if start is None:
        initial = rotation.new_zeros(num_classes, len(rotation))
    else:
        initial = start.to(dtype) @ rotation  # (K, D + 1)
    probabilities = (inputs @ initial.T).softmax(dim=1)  # (N, K)
    variances = probabilities * (1 - probabilities)
    # The diagonal of the Hessian of the loss, (K, D + 1).
    curvature = variances.T @ inputs.square() / len(inputs) + penalty
    scale = curvature.clamp(min=_MIN_CURVATURE).rsqrt()
    scaled_weight = (initial / scale).requires_grad_()  # what L-BFGS optimizes
    optimizer = torch.optim.LBFGS(
        [scaled_weight],
        max_iter=_MAX_ITERATIONS,
        max_eval=2 * _MAX_ITERATIONS,
        tolerance_grad=tolerance,
        tolerance_change=0.0,
        history_size=_HISTORY_SIZE,
        line_search_fn="strong_wolfe",
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        weight = scaled_weight * scale
        value = F.cross_entropy(inputs @ weight.T, labels) + (weight.square() @ penalty).sum() / 2
        value.backward()
        return value

    optimizer.step(loss)
    loss()  # computes the gradient at the solution
    assert scaled_weight.grad is not None
    gradient = float((scaled_weight.grad / scale @ rotation.T).abs().max())
    weight = (scaled_weight.detach() * scale @ rotation.T).double()
    return LinearProbe(mean, inverse_std, weight, l2, gradient)


def _with_one(features: Tensor) -> Tensor:
    """Appends a column of ones, which the bias is multiplied with: (N, D) to (N, D + 1)."""
    return torch.cat([features, features.new_ones(len(features), 1)], dim=1)


@dataclass(frozen=True)
class Whitening:
    """Standardizes the C channels of feature maps, and makes them uncorrelated.

    The variances of the principal components become almost equal: s becomes s / (s + 0.01). The
    constant keeps components without variance from being amplified.
    """

    mean: Tensor  # (C,), which is subtracted
    matrix: Tensor  # (C, C), by which the difference is multiplied

    @classmethod
    def of(cls, maps: Tensor) -> "Whitening":
        """Estimates the whitening on feature maps (N, C, H, W), over all images and positions."""
        mean, inverse_std = channel_statistics(maps)
        mean = mean.float()
        inverse_std = inverse_std.float()
        num_channels = maps.shape[1]
        products = maps.new_zeros(num_channels, num_channels, dtype=torch.float64)
        for part in maps.split(_CHUNK):
            flat = part.float().transpose(0, 1).flatten(1).T  # (NHW, C)
            standardized = (flat - mean) * inverse_std
            products += (standardized.T @ standardized).double()
        covariance = products * num_channels / maps.numel()  # divides by the number of rows, NHW
        variances, components = torch.linalg.eigh(covariance)  # (C,), (C, C)
        std = (variances.clamp(min=0) + _VARIANCE_FLOOR).sqrt()
        matrix = inverse_std.double()[:, None] * components / std
        return cls(mean, matrix.float())

    def __call__(self, maps: Tensor) -> Tensor:
        """Whitens feature maps (N, C, H, W) and keeps their dtype."""
        result = torch.empty_like(maps)
        for part, output in zip(maps.split(_CHUNK), result.split(_CHUNK), strict=True):
            centered = part.float().flatten(2).transpose(1, 2) - self.mean  # (N, HW, C)
            whitened = (centered @ self.matrix).transpose(1, 2)  # (N, C, HW)
            output.copy_(whitened.view_as(part))
        return result


@dataclass(frozen=True)
class TransformerSettings:
    """Training settings of a tran-k probe. The paper's widths are 192, 384 and 768."""

    depth: int = 1  # k, the number of blocks
    width: int = 192  # width of the blocks, a multiple of 64
    dropouts: tuple[float, ...] = (0.2, 0.5)  # dropout rates to select from
    trial_epochs: int = 4  # number of epochs after which only the best dropout rate continues
    max_epochs: int = 20
    patience: int = 4  # training stops after this number of epochs without improvement
    positions: float = 0.25  # share of a feature map's positions that a training step uses
    batch_size: int = 64
    learning_rate: float = 1e-3  # learning rate of AdamW, after one epoch of warm-up
    weight_decay: float = 0.1
    label_smoothing: float = 0.1


class TransformerProbe:
    """Trains a decoder on whitened feature maps. Classifies with averaged weights."""

    def __init__(
        self,
        features: FrozenFeatures,
        *,
        num_classes: int,
        dropout: float,
        settings: TransformerSettings,
        device: str | torch.device = "cpu",
    ) -> None:
        """``features`` are the features of the training images. Their maps must be whitened."""
        assert features.maps is not None
        self._features = features
        self._settings = settings
        self._device = device
        shapes = {_MAP: ShapeSpec(channels=features.maps.shape[1])}
        if features.tokens is not None:
            shapes["tokens"] = ShapeSpec(channels=features.tokens.shape[2])
        self.decoder = TransformerDecoder(
            input_shape=shapes,
            num_classes=num_classes,
            dim=settings.width,
            depth=settings.depth,
            dropout=dropout,
            in_feature=_MAP,
        ).to(device)
        self._steps_per_epoch = math.ceil(len(features) / settings.batch_size)
        decay = 1 - 1 / (1 + self._steps_per_epoch)  # averages over about one epoch
        self.average = AveragedModel(self.decoder, multi_avg_fn=get_ema_multi_avg_fn(decay))
        parameters = list(self.decoder.parameters())
        matrices = [parameter for parameter in parameters if parameter.ndim > 1]
        norms_and_biases = [parameter for parameter in parameters if parameter.ndim <= 1]
        groups = [
            {"params": matrices, "weight_decay": settings.weight_decay},
            {"params": norms_and_biases, "weight_decay": 0.0},
        ]
        self._optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate)
        self._num_steps = 0  # taken so far

    def run_epoch(self) -> None:
        """Trains for one epoch. PyTorch's global generator decides the order of images."""
        self.decoder.train()
        order = torch.randperm(len(self._features))
        for indices in order.tensor_split(self._steps_per_epoch):
            self._num_steps += 1
            warmup = min(1.0, self._num_steps / self._steps_per_epoch)  # in the first epoch
            for group in self._optimizer.param_groups:
                group["lr"] = self._settings.learning_rate * warmup
            logits = self.decoder(self._inputs(self._features, indices, self._settings.positions))
            loss = F.cross_entropy(
                logits,
                self._features.labels[indices].to(self._device),
                label_smoothing=self._settings.label_smoothing,
            )
            self._optimizer.zero_grad()
            loss.backward()
            self._optimizer.step()
            self.average.update_parameters(self.decoder)

    @torch.no_grad()
    def __call__(self, features: FrozenFeatures) -> Tensor:
        """Returns logits (N, K) on the CPU. The feature maps of ``features`` must be whitened."""
        self.average.eval()
        parts = torch.arange(len(features)).split(_CHUNK)
        return torch.cat([self.average(self._inputs(features, part)).cpu() for part in parts])

    def _inputs(
        self, features: FrozenFeatures, indices: Tensor, share: float = 1.0
    ) -> dict[str, Tensor]:
        """Returns the decoder's inputs for the images at ``indices``, on the training device.

        With a ``share`` below 1, only a random share of the positions of the maps is used.
        """
        assert features.maps is not None
        maps = features.maps[indices].flatten(2)  # (N, C, HW)
        if share < 1:
            num_positions = max(1, round(share * maps.shape[2]))
            positions = torch.randperm(maps.shape[2])[:num_positions]
            maps = maps[:, :, positions]
        maps = maps.to(self._device).float()
        # (N, C, HW, 1). The order of positions does not matter to the decoder.
        inputs = {_MAP: maps[..., None]}
        if features.tokens is not None:
            inputs["tokens"] = features.tokens[indices].to(self._device)
        return inputs


def fit_transformer_probe(
    features: FrozenFeatures,
    *,
    num_classes: int,
    settings: TransformerSettings,
    seed: int = 0,
    device: str | torch.device = "cpu",
) -> tuple[Callable[[FrozenFeatures], Tensor], dict[str, Any]]:
    """Selects dropout and number of epochs on held-out images, then trains on all images.

    ``features`` must have feature maps. ``seed`` determines the held-out images, the initial
    weights and the order of images.

    Returns a function from features to logits (N, K) on the CPU, and a dict with these keys:

    - "dropout": the selected dropout rate.
    - "epochs": the selected number of epochs.
    - "converged": whether training on the held-out split stopped before ``max_epochs``.
    - "trials": held-out accuracies in percent after each epoch, by dropout rate as a string.
    """
    assert features.maps is not None
    whiten = Whitening.of(features.maps)
    whitened = _whitened(features, whiten)
    train_indices, held_out_indices = split_by_class(features.labels, seed=seed)
    train = whitened.select(train_indices)
    held_out = whitened.select(held_out_indices)

    def build_probe(images: FrozenFeatures, dropout: float) -> TransformerProbe:
        torch.manual_seed(seed)
        return TransformerProbe(
            images, num_classes=num_classes, dropout=dropout, settings=settings, device=device
        )

    def run_epoch(rate: float) -> None:
        """Trains the probe with a dropout rate for one epoch, and measures its accuracy."""
        probes[rate].run_epoch()
        logits = torch.empty(0, num_classes)
        if len(held_out):
            logits = probes[rate](held_out)
        accuracies[rate].append(measure_accuracy(logits, held_out.labels))

    probes: dict[float, TransformerProbe] = {}  # by dropout rate
    accuracies: dict[float, list[float]] = {}  # after each epoch, by dropout rate
    with preserved_randomness():
        for rate in settings.dropouts:
            probes[rate] = build_probe(train, rate)
            accuracies[rate] = []
            for _ in range(min(settings.trial_epochs, settings.max_epochs)):
                run_epoch(rate)
        # Among equal accuracies, the higher rate is selected.
        dropout = max(accuracies, key=lambda rate: (max(accuracies[rate]), rate))
        while len(accuracies[dropout]) < settings.max_epochs:
            if _has_converged(accuracies[dropout], settings.patience):
                break
            run_epoch(dropout)
        epochs = 1 + accuracies[dropout].index(max(accuracies[dropout]))
        probes.clear()  # frees their memory
        probe = build_probe(whitened, dropout)
        for _ in range(epochs):
            probe.run_epoch()

    def classify(others: FrozenFeatures) -> Tensor:
        return probe(_whitened(others, whiten))

    return classify, {
        "dropout": dropout,
        "epochs": epochs,
        "converged": _has_converged(accuracies[dropout], settings.patience),
        "trials": {f"{rate:g}": values for rate, values in accuracies.items()},
    }


def _whitened(features: FrozenFeatures, whiten: Whitening) -> FrozenFeatures:
    assert features.maps is not None
    return replace(features, maps=whiten(features.maps))


def _has_converged(accuracies: list[float], patience: int) -> bool:
    """Whether the last ``patience`` epochs brought no improvement of the best accuracy."""
    best_epoch = accuracies.index(max(accuracies))
    last_epoch = len(accuracies) - 1
    return last_epoch - best_epoch >= patience
