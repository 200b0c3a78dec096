# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The tran-k probe on maps that were worked out once, trained until it stops getting better.

The decoder and what it is trained with (AdamW, weight decay, label smoothing) are those of the
QB-Heat paper's Table 11. Unlike there, images are not augmented, or their maps could not be kept;
instead dropout and length, which decide, are chosen for each encoder on a part of its *training*
images. The rate is constant and the weights are averaged over about an epoch, so that one
training serves every length. Channels are whitened first, which the projection could undo; without
it, the trainings that are affordable here end long before they have converged.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from detectron2.layers import ShapeSpec
from torch import Tensor
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from qbheat_det.data import preserved_randomness
from qbheat_det.modeling.classification import TransformerDecoder
from qbheat_det.probing.features import FrozenFeatures, split_by_class

_MAP = "map"
_NO_MAPS = "a tran-k probe learns from maps, and there are none"
_CHUNK = 256  # images at a time where nothing is learned
_FLAT = 1e-6  # spread of a channel, relative to the largest, below which it is constant
_FLOOR = 1e-2  # added to the variances along the axes, of which the mean is 1


@dataclass(frozen=True)
class Whitening:
    """Standardises channels, turns them to the principal axes, and evens out the variances.

    An axis of variance s, of standardised channels, ends with s / (s + 0.01): the least, which
    are noise, stay small.

    Attributes:
        mean: of each channel, (C,).
        matrix: what the difference to ``mean`` is multiplied by, (C, C).
    """

    mean: Tensor
    matrix: Tensor

    @classmethod
    def of(cls, maps: Tensor) -> "Whitening":
        """Reads it off maps (N, C, H, W), over all images and positions."""
        mean, scale = channel_statistics(maps)
        covariance = maps.new_zeros(maps.shape[1], maps.shape[1], dtype=torch.float64)
        for part in maps.split(_CHUNK):
            flat = ((part.float().transpose(0, 1).flatten(1).T) - mean) * scale
            covariance += (flat.T @ flat).double()
        variances, axes = torch.linalg.eigh(covariance * maps.shape[1] / maps.numel())
        matrix = scale.double()[:, None] * axes / (variances.clamp(min=0) + _FLOOR).sqrt()
        return cls(mean, matrix.float())

    def __call__(self, maps: Tensor) -> Tensor:
        """Applies it to maps (N, C, H, W), and returns them as the type they have."""
        result = torch.empty_like(maps)
        for part, into in zip(maps.split(_CHUNK), result.split(_CHUNK), strict=True):
            flat = part.float().flatten(2).transpose(1, 2) - self.mean  # (N, HW, C)
            into.copy_((flat @ self.matrix).transpose(1, 2).view_as(part))
        return result


def channel_statistics(maps: Tensor) -> tuple[Tensor, Tensor]:
    """Returns mean (C,), and one over the standard deviation (C,), over images and positions.

    Channels that are constant have 0 instead.
    """
    count = maps.numel() // maps.shape[1]
    parts = maps.split(_CHUNK)
    mean = torch.stack([part.double().sum(dim=(0, 2, 3)) for part in parts]).sum(dim=0) / count
    centred = mean[:, None, None]
    squares = [(part.double() - centred).square().sum(dim=(0, 2, 3)) for part in parts]
    spread = (torch.stack(squares).sum(dim=0) / count).sqrt()
    varies = spread > _FLAT * spread.max()
    scale = torch.where(varies, 1 / spread.clamp(min=torch.finfo(spread.dtype).tiny), 0.0)
    return mean.float(), scale.float()


@dataclass(frozen=True)
class TransformerSettings:
    """How a tran-k probe is trained.

    Attributes:
        depth: k, blocks.
        width: of the blocks, a multiple of 64; the paper has 192, 384 and 768 for MF-285M, MF-1.0G
            and MF-3.7G.
        dropouts: rates to choose from.
        trial_epochs: after as many, only the rate that has done best goes on.
        max_epochs: the most.
        patience: epochs without a better accuracy after which it is over.
        positions: share of a map's positions that a step learns from, drawn for all its images;
            classification reads all. It is what a step costs, and keeps from overfitting.
        batch_size: images of a step.
        learning_rate: of AdamW, after one epoch of warm-up.
        weight_decay: of AdamW.
        label_smoothing: of the loss.
        share: of the training images on which dropout and length are chosen.
    """

    depth: int = 1
    width: int = 192
    dropouts: tuple[float, ...] = (0.2, 0.5)
    trial_epochs: int = 4
    max_epochs: int = 20
    patience: int = 4
    positions: float = 0.25
    batch_size: int = 64
    learning_rate: float = 1e-3
    weight_decay: float = 0.1
    label_smoothing: float = 0.1
    share: float = 0.2

    def to_dict(self) -> dict[str, Any]:
        """Returns numbers and lists of them, by name."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}


class TransformerProbe:
    """A decoder in training on whitened maps, one epoch at a time.

    Its classifications are those of the averaged weights.
    """

    def __init__(
        self,
        features: FrozenFeatures,
        *,
        num_classes: int,
        dropout: float,
        settings: TransformerSettings,
        device: str | torch.device = "cpu",
    ) -> None:
        """
        Args:
            features: with whitened maps, of the images to learn from.
            num_classes: K.
            dropout: rate inside the blocks.
            settings: all else.
            device: that trains; the maps stay where they are.

        Raises:
            ValueError: there are no maps.
        """
        if features.maps is None or not len(features):
            raise ValueError(_NO_MAPS)
        self._features, self._settings, self._device = features, settings, device
        shapes = {_MAP: ShapeSpec(channels=features.maps.shape[1])}
        if features.tokens is not None:
            shapes["tokens"] = ShapeSpec(channels=features.tokens.shape[2])
        self._decoder = TransformerDecoder(
            input_shape=shapes,
            num_classes=num_classes,
            dim=settings.width,
            depth=settings.depth,
            dropout=dropout,
            in_feature=_MAP,
        ).to(device)
        self._steps = -(-len(features) // settings.batch_size)  # of an epoch
        self._average = AveragedModel(
            self._decoder, multi_avg_fn=get_ema_multi_avg_fn(1 - 1 / (1 + self._steps))
        )
        # As elsewhere, norms and biases do not decay.
        matrices = [p for p in self._decoder.parameters() if p.ndim > 1]
        others = [p for p in self._decoder.parameters() if p.ndim <= 1]
        groups: list[dict[str, Any]] = [{"params": matrices}, {"params": others}]
        groups[0]["weight_decay"], groups[1]["weight_decay"] = settings.weight_decay, 0.0
        self._optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate)
        self._done = 0

    def run_epoch(self) -> None:
        """Goes once through the training images, in an order drawn from the global generator."""
        self._decoder.train()
        order = torch.randperm(len(self._features))
        for places in order.tensor_split(self._steps):
            self._done += 1
            for group in self._optimizer.param_groups:
                group["lr"] = self._settings.learning_rate * min(1.0, self._done / self._steps)
            logits = self._decoder(self._inputs(self._features, places, self._settings.positions))
            loss = F.cross_entropy(
                logits,
                self._features.labels[places].to(self._device),
                label_smoothing=self._settings.label_smoothing,
            )
            self._optimizer.zero_grad()
            loss.backward()
            self._optimizer.step()
            self._average.update_parameters(self._decoder)

    @torch.no_grad()
    def __call__(self, features: FrozenFeatures) -> Tensor:
        """Returns the logits (N, K) of images with whitened maps, on the CPU."""
        self._average.eval()
        parts = torch.arange(len(features)).split(_CHUNK)
        return torch.cat([self._average(self._inputs(features, part)).cpu() for part in parts])

    def weights(self) -> dict[str, Tensor]:
        """Returns copies of the weights as trained, by name."""
        return {name: value.detach().clone() for name, value in self._decoder.state_dict().items()}

    def averaged_weights(self) -> dict[str, Tensor]:
        """Returns copies of the averaged weights, by name: those of a ``TransformerDecoder``."""
        state = self._average.module.state_dict()
        return {name: value.detach().clone() for name, value in state.items()}

    def _inputs(
        self, features: FrozenFeatures, places: Tensor, share: float = 1.0
    ) -> dict[str, Tensor]:
        assert features.maps is not None
        maps = features.maps[places].flatten(2)  # (N, C, HW)
        if share < 1:
            positions = torch.randperm(maps.shape[2])[: max(1, round(share * maps.shape[2]))]
            maps = maps[:, :, positions]
        maps = maps.to(self._device).float()
        inputs = {_MAP: maps[..., None]}  # the decoder knows of no neighbours: any shape will do
        if features.tokens is not None:
            inputs["tokens"] = features.tokens[places].to(self._device)
        return inputs


@dataclass(frozen=True)
class FittedTransformer:
    """A classifier of maps as a backbone gives them.

    Attributes:
        whiten: by the statistics of the training images.
        probe: what was trained.
    """

    whiten: Whitening
    probe: TransformerProbe

    def __call__(self, features: FrozenFeatures) -> Tensor:
        """Returns the logits (N, K) of images, on the CPU."""
        return self.probe(_whitened(features, self.whiten))


def fit_transformer_probe(
    features: FrozenFeatures,
    *,
    num_classes: int,
    settings: TransformerSettings,
    seed: int = 0,
    device: str | torch.device = "cpu",
) -> tuple[FittedTransformer, dict[str, Any]]:
    """Chooses dropout and length on a part of the images, then trains on all of them with these.

    Args:
        features: with maps.
        num_classes: K.
        settings: what is tried.
        seed: of the part, of the initial weights and of the order of images.
        device: that trains.

    Raises:
        ValueError: there are no maps.

    Returns:
        The classifier; and "dropout", "epochs", "converged" (whether it stopped getting better
        before the longest training ended), and "trials", the accuracy in per cent on the part set
        aside after each epoch, by dropout as text.
    """
    if features.maps is None or not len(features):
        raise ValueError(_NO_MAPS)
    whiten = Whitening.of(features.maps)
    features = _whitened(features, whiten)
    fitted, aside = split_by_class(features.labels, share=settings.share, seed=seed)
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
    return FittedTransformer(whiten, probe), {
        "dropout": dropout,
        "epochs": epochs,
        "converged": _is_over(found, settings.patience),
        "trials": {f"{rate:g}": values for rate, values in trials.items()},
    }


def _whitened(features: FrozenFeatures, whiten: Whitening) -> FrozenFeatures:
    assert features.maps is not None
    return replace(features, maps=whiten(features.maps))


def _accuracies(probe: TransformerProbe, asked: FrozenFeatures) -> Iterator[float]:
    """Trains without end, and yields after each epoch the accuracy in per cent on other images."""
    while True:
        probe.run_epoch()
        correct = (probe(asked).argmax(dim=1) == asked.labels).double().mean() if len(asked) else 0
        yield 100 * float(correct)


def _is_over(values: list[float], patience: int) -> bool:
    return len(values) - 1 - values.index(max(values)) >= patience
