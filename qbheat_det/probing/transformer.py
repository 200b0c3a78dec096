# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Trains the tran-k probe on cached feature maps until it stops improving.

Decoder, AdamW, weight decay and label smoothing follow QB-Heat's Table 11. Unlike there, images are
not augmented, because their maps are cached; dropout and the number of epochs are chosen for each
encoder on held-out *training* images. The learning rate is constant and weights are averaged over
about one epoch, so one training serves all lengths. Whitened channels converge faster.
"""

from collections.abc import Callable, Iterator
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

_MAP = "map"
_CHUNK = 256  # images at a time in inference
_FLOOR = 1e-2  # added to the variances along the axes, of which the mean is 1


@dataclass(frozen=True)
class Whitening:
    """Whitens C channels; a principal axis with variance s gets the variance s / (s + 0.01)."""

    mean: Tensor  # (C,)
    matrix: Tensor  # (C, C), of the difference to the mean

    @classmethod
    def of(cls, maps: Tensor) -> "Whitening":
        """Estimates it on maps (N, C, H, W), over all images and positions."""
        mean, scale = (values.float() for values in channel_statistics(maps))
        covariance = maps.new_zeros(maps.shape[1], maps.shape[1], dtype=torch.float64)
        for part in maps.split(_CHUNK):
            flat = ((part.float().transpose(0, 1).flatten(1).T) - mean) * scale
            covariance += (flat.T @ flat).double()
        variances, axes = torch.linalg.eigh(covariance * maps.shape[1] / maps.numel())
        matrix = scale.double()[:, None] * axes / (variances.clamp(min=0) + _FLOOR).sqrt()
        return cls(mean, matrix.float())

    def __call__(self, maps: Tensor) -> Tensor:
        """Whitens maps (N, C, H, W) and keeps their dtype."""
        result = torch.empty_like(maps)
        for part, into in zip(maps.split(_CHUNK), result.split(_CHUNK), strict=True):
            flat = part.float().flatten(2).transpose(1, 2) - self.mean  # (N, HW, C)
            into.copy_((flat @ self.matrix).transpose(1, 2).view_as(part))
        return result


@dataclass(frozen=True)
class TransformerSettings:
    """Training settings of a tran-k probe; the paper's widths are 192, 384 and 768."""

    depth: int = 1  # k, blocks
    width: int = 192  # of the blocks, a multiple of 64
    dropouts: tuple[float, ...] = (0.2, 0.5)  # rates to choose from
    trial_epochs: int = 4  # after these, only the best rate continues
    max_epochs: int = 20
    patience: int = 4  # epochs without a better accuracy after which training stops
    positions: float = 0.25  # share of a map's positions that a training step reads
    batch_size: int = 64
    learning_rate: float = 1e-3  # of AdamW, after one epoch of warm-up
    weight_decay: float = 0.1
    label_smoothing: float = 0.1


class TransformerProbe:
    """A decoder in training on whitened maps, one epoch at a time; its ``average`` classifies."""

    def __init__(
        self,
        features: FrozenFeatures,
        *,
        num_classes: int,
        dropout: float,
        settings: TransformerSettings,
        device: str | torch.device = "cpu",
    ) -> None:
        """Takes whitened maps of the images to learn from, K, and the device that trains."""
        assert features.maps is not None
        self._features, self._settings, self._device = features, settings, device
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
        self._steps = -(-len(features) // settings.batch_size)  # of an epoch
        self.average = AveragedModel(
            self.decoder, multi_avg_fn=get_ema_multi_avg_fn(1 - 1 / (1 + self._steps))
        )
        # Norms and biases do not decay.
        groups = [
            {"params": [p for p in self.decoder.parameters() if (p.ndim > 1) is decays],
             "weight_decay": settings.weight_decay if decays else 0.0}
            for decays in (True, False)
        ]  # fmt: skip
        self._optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate)
        self._done = 0

    def run_epoch(self) -> None:
        """Trains for one epoch in an order drawn from the global generator."""
        self.decoder.train()
        order = torch.randperm(len(self._features))
        for places in order.tensor_split(self._steps):
            self._done += 1
            for group in self._optimizer.param_groups:
                group["lr"] = self._settings.learning_rate * min(1.0, self._done / self._steps)
            logits = self.decoder(self._inputs(self._features, places, self._settings.positions))
            loss = F.cross_entropy(
                logits,
                self._features.labels[places].to(self._device),
                label_smoothing=self._settings.label_smoothing,
            )
            self._optimizer.zero_grad()
            loss.backward()
            self._optimizer.step()
            self.average.update_parameters(self.decoder)

    @torch.no_grad()
    def __call__(self, features: FrozenFeatures) -> Tensor:
        """Returns the logits (N, K) of images with whitened maps, on the CPU."""
        self.average.eval()
        parts = torch.arange(len(features)).split(_CHUNK)
        return torch.cat([self.average(self._inputs(features, part)).cpu() for part in parts])

    def _inputs(
        self, features: FrozenFeatures, places: Tensor, share: float = 1.0
    ) -> dict[str, Tensor]:
        assert features.maps is not None
        maps = features.maps[places].flatten(2)  # (N, C, HW)
        if share < 1:
            positions = torch.randperm(maps.shape[2])[: max(1, round(share * maps.shape[2]))]
            maps = maps[:, :, positions]
        maps = maps.to(self._device).float()
        inputs = {_MAP: maps[..., None]}  # the decoder ignores the layout of positions
        if features.tokens is not None:
            inputs["tokens"] = features.tokens[places].to(self._device)
        return inputs


def fit_transformer_probe(
    features: FrozenFeatures,
    *,
    num_classes: int,
    settings: TransformerSettings,
    seed: int = 0,
    device: str | torch.device = "cpu",
) -> tuple[Callable[[FrozenFeatures], Tensor], dict[str, Any]]:
    """Chooses dropout and number of epochs on held-out images, then trains on all images.

    Args:
        features: with maps.
        num_classes: K.
        settings: what is tried.
        seed: of the part, of the initial weights and of the order of images.
        device: that trains.

    Raises:
        ValueError: there are no maps.

    Returns:
        The classifier, from features with maps to logits (N, K) on the CPU; and "dropout",
        "epochs", "converged" (whether it stopped before ``max_epochs``), and "trials", the
        accuracy in per cent on the part held out after each epoch, by dropout as text.
    """
    if features.maps is None or not len(features):
        raise ValueError("a tran-k probe learns from maps, and there are none")
    whiten = Whitening.of(features.maps)
    features = _whitened(features, whiten)
    fitted, aside = split_by_class(features.labels, seed=seed)
    train, asked = features.select(fitted), features.select(aside)

    def start(part: FrozenFeatures, dropout: float) -> TransformerProbe:
        torch.manual_seed(seed)
        return TransformerProbe(
            part, num_classes=num_classes, dropout=dropout, settings=settings, device=device
        )

    with preserved_randomness():
        trials: dict[float, list[float]] = {}
        running: dict[float, Iterator[float]] = {}
        for dropout in settings.dropouts:
            running[dropout] = _accuracies(start(train, dropout), asked)
            first = min(settings.trial_epochs, settings.max_epochs)
            trials[dropout] = [next(running[dropout]) for _ in range(first)]
        dropout = max(trials, key=lambda rate: (max(trials[rate]), rate))
        found = trials[dropout]
        while len(found) < settings.max_epochs and not _is_over(found, settings.patience):
            found.append(next(running[dropout]))
        epochs = 1 + found.index(max(found))
        del running
        probe = start(features, dropout)
        for _ in range(epochs):
            probe.run_epoch()
    return lambda asked: probe(_whitened(asked, whiten)), {
        "dropout": dropout,
        "epochs": epochs,
        "converged": _is_over(found, settings.patience),
        "trials": {f"{rate:g}": values for rate, values in trials.items()},
    }


def _whitened(features: FrozenFeatures, whiten: Whitening) -> FrozenFeatures:
    assert features.maps is not None
    return replace(features, maps=whiten(features.maps))


def _accuracies(probe: TransformerProbe, asked: FrozenFeatures) -> Iterator[float]:
    """Trains without end and yields the held-out accuracy in percent after each epoch."""
    while True:
        probe.run_epoch()
        yield measure_accuracy(probe(asked), asked.labels) if len(asked) else 0.0


def _is_over(values: list[float], patience: int) -> bool:
    return len(values) - 1 - values.index(max(values)) >= patience
