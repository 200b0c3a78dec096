# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Loads frozen backbones, caches their features for all probes, and recalibrates BatchNorm.

QB-Heat estimates BatchNorm statistics on quarters of images. ``recalibrate_bn`` estimates them on
whole images, with fvcore's implementation of "Rethinking 'Batch' in BatchNorm", arXiv:2105.07576.
"""

import logging
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog
from detectron2.modeling import Backbone
from detectron2.structures import ImageList
from fvcore.nn.precise_bn import BN_MODULE_TYPES, update_bn_stats
from torch import Tensor

from qbheat_det.checkpoint import WeightsInfo, bare_backbone, fit_weights, read_weights
from qbheat_det.core.errors import UserError
from qbheat_det.core.seeding import undisturbed
from qbheat_det.data import ImageBatches, build_mapper, cut, join_messages, raise_first
from qbheat_det.modeling.contracts import normalise_pixels, optional_modules

logger = logging.getLogger(__name__)
_HELD_OUT_SHARE = 0.2  # of each class
_CHUNK = 256  # number of images whose features are converted to float64 together
_MIN_STD = 1e-6  # channels with less than this share of the largest std count as constant


@dataclass(frozen=True)
class FrozenFeatures:
    """Features of N images, on the CPU.

    Attributes:
        pooled: means of the feature maps over all positions, (N, C).
        labels: classes, (N,).
        maps: feature maps in float16, (N, C, H, W); None if they were not kept.
        tokens: tokens, (N, M, D); None if the backbone has no tokens.
    """

    pooled: Tensor
    labels: Tensor
    maps: Tensor | None = None
    tokens: Tensor | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def joined(self) -> Tensor:
        """The input of the linear probe: ``pooled`` and the first token, if any, concatenated."""
        if self.tokens is None:
            return self.pooled
        return torch.cat([self.pooled, self.tokens[:, 0]], dim=1)

    def select(self, indices: Tensor) -> "FrozenFeatures":
        """Returns a copy of the features of the images at ``indices``."""
        return FrozenFeatures(
            self.pooled[indices],
            self.labels[indices],
            maps=None if self.maps is None else self.maps[indices],
            tokens=None if self.tokens is None else self.tokens[indices],
        )


@torch.no_grad()
def cache_features(
    describe: Callable[[list[dict[str, Any]]], Mapping[str, Tensor]],
    batches: Iterable[list[dict[str, Any]]],
    *,
    num_images: int,
    feature: str,
    keep_maps: bool = False,
    memory_gb: float = 8.0,
) -> FrozenFeatures:
    """Runs a backbone on all images, and returns its features.

    Args:
        describe: runs the backbone on a batch, and returns its outputs by name.
        batches: the images, as lists of dicts with "label".
        num_images: largest number of images in all batches together.
        feature: name of the feature map (N, C, H, W) in the outputs.
        keep_maps: whether to keep feature maps, clipped to the range of float16.
        memory_gb: memory limit for feature maps, in GB.

    Raises:
        UserError: the feature maps need more than ``memory_gb``.
    """
    pooled: list[Tensor] = []
    tokens: list[Tensor] = []
    labels: list[int] = []
    maps: Tensor | None = None
    largest = torch.finfo(torch.float16).max
    for batch in batches:
        outputs = describe(batch)
        batch_maps = outputs[feature].float()  # (N, C, H, W)
        if keep_maps and maps is None:  # the first batch, which tells the size of a map
            needed = num_images * batch_maps[0].numel() * torch.float16.itemsize / 1e9
            if needed > memory_gb:
                raise UserError(
                    f"the maps of {num_images:,} images take {needed:.1f} GB of memory, more "
                    f"than --memory-gb {memory_gb:.1f}: raise it, or probe without tran-k"
                )
            maps = torch.empty((num_images, *batch_maps.shape[1:]), dtype=torch.float16)
        if maps is not None:
            begin = len(labels)  # number of images so far
            maps[begin : begin + len(batch)] = batch_maps.clamp(-largest, largest).cpu()
        pooled.append(batch_maps.mean(dim=(2, 3)).cpu())
        if "tokens" in outputs:
            tokens.append(outputs["tokens"].float().cpu())
        labels += [entry["label"] for entry in batch]
    return FrozenFeatures(
        pooled=torch.cat(pooled) if pooled else torch.empty(0, 0),
        labels=torch.tensor(labels, dtype=torch.long),
        maps=None if maps is None else maps[: len(labels)],
        tokens=torch.cat(tokens) if tokens else None,
    )


def split_by_class(labels: Tensor, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Splits images with ``labels`` (N,) into training and held-out images.

    Returns the sorted indices of the training images, and those of the held-out images. A fifth of
    each class is held out. If a class has two or more images, at least one is held out.
    """
    generator = random.Random(seed)
    is_held_out = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique().tolist():
        indices = (labels == label).nonzero()[:, 0].tolist()
        if len(indices) > 1:
            count = max(1, round(_HELD_OUT_SHARE * len(indices)))
            count = min(count, len(indices) - 1)
            is_held_out[generator.sample(indices, count)] = True
    training_indices = (~is_held_out).nonzero()[:, 0]
    held_out_indices = is_held_out.nonzero()[:, 0]
    return training_indices, held_out_indices


def channel_statistics(features: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the mean and 1 / std of each channel of features (N, C, ...), both (C,) in float64.

    For constant channels, 1 / std is replaced by 0.
    """
    count = features.numel() // features.shape[1]  # number of values of a channel
    # (N, C) features become (N, C, 1), and maps (N, C, H, W) become (N, C, HW).
    parts = [part[..., None].flatten(2) for part in features.split(_CHUNK)]
    sums = [part.double().sum(dim=(0, 2)) for part in parts]
    mean = torch.stack(sums).sum(dim=0) / count
    squares = [(part.double() - mean[:, None]).square().sum(dim=(0, 2)) for part in parts]
    std = (torch.stack(squares).sum(dim=0) / count).sqrt()
    inverse_std = 1 / std.clamp(min=torch.finfo(std.dtype).tiny)
    is_varying = std > _MIN_STD * std.max()
    return mean, torch.where(is_varying, inverse_std, 0.0)


def measure_accuracy(logits: Tensor, labels: Tensor) -> float:
    """Returns the accuracy of logits (N, K) in percent, or 0 if there are no images."""
    if not len(labels):
        return 0.0
    return 100 * float((logits.argmax(dim=1) == labels).double().mean())


def recalibrate_bn(
    backbone: Backbone,
    images: Sequence[Tensor],
    *,
    pixel_mean: Sequence[float],
    pixel_std: Sequence[float],
    batch_size: int = 32,
) -> int:
    """Recomputes the running statistics of a backbone's BatchNorms on ``images``.

    During recalibration, BatchNorms use batch statistics, as in training. A batch has images of one
    size. Frozen BatchNorms do not change.

    Args:
        backbone: the backbone, which is changed in place.
        images: images (3, H, W), as returned by a dataset mapper.
        pixel_mean: mean of each channel, which is subtracted.
        pixel_std: standard deviation of each channel, by which the difference is divided.
        batch_size: largest number of images in a batch.

    Returns:
        The number of changed BatchNorms.

    Raises:
        UserError: there are no images.
    """
    if not images:
        raise UserError("BatchNorm is recalibrated on images, but there are none")
    norms = [module for module in backbone.modules() if isinstance(module, BN_MODULE_TYPES)]
    images_by_size: dict[torch.Size, list[Tensor]] = {}
    for image in images:
        images_by_size.setdefault(image.shape, []).append(image)
    batches: list[list[Tensor]] = []
    for equal_images in images_by_size.values():
        # Batches of about equal size, because statistics of a small batch are noisy.
        num_batches = math.ceil(len(equal_images) / batch_size)
        batches += cut(equal_images, num_batches)
    device = next(backbone.parameters()).device

    def normalise(batch: list[Tensor]) -> Tensor:
        """Returns the input (N, 3, H, W) of the backbone, padded if it needs this."""
        normalised = [normalise_pixels(image.to(device), pixel_mean, pixel_std) for image in batch]
        return ImageList.from_tensors(normalised, backbone.size_divisibility).tensor

    with undisturbed(backbone):
        for norm in norms:
            norm.train()
        update_bn_stats(backbone, map(normalise, batches), num_iters=len(batches))
    for norm in norms:  # rounding errors can make a variance negative
        norm.running_var.clamp_(min=0)
    return len(norms)


def training_records(cfg: CfgNode) -> list[dict[str, Any]]:
    """Returns the records of ``DATASETS.TRAIN``.

    Raises a ``UserError`` if the key is empty or names an unregistered dataset.
    """
    names = list(cfg.DATASETS.TRAIN)
    unknown = [name for name in names if name not in DatasetCatalog]
    if unknown or not names:
        raise UserError(
            f"DATASETS.TRAIN is {names}, of which {unknown} are not registered: name a folder with "
            "--images"
        )
    return [record for name in names for record in DatasetCatalog.get(name)]


def read_whole_images(
    cfg: CfgNode, records: Sequence[dict[str, Any]], num_images: int
) -> list[Tensor]:
    """Reads a sample of ``num_images`` images (3, H, W) with the config's mapper for evaluation.

    The sample is random, but the same in each call. Unreadable images are skipped with a warning.
    Raises a ``UserError`` if no image can be read.
    """
    chosen = random.Random(0).sample(list(records), min(num_images, len(records)))
    mapper = build_mapper(cfg, is_train=False)
    workers = cfg.DATALOADER.NUM_WORKERS
    batches = ImageBatches(chosen, mapper=mapper, num_workers=workers, shared=False)
    images = [entry["image"] for batch in batches for entry in batch]
    skipped = list(batches.skipped.values())
    if not images:
        raise_first(skipped)
    if skipped:
        logger.warning(f"Left out, {len(skipped):,} in all: {join_messages(skipped)}")
    return images


def load_backbone(backbone: Backbone, weights: str) -> WeightsInfo | None:
    """Loads a backbone from the weights of a whole model or of a backbone alone.

    Returns the metadata of the file, or None. Raises a ``UserError`` if the backbone in the file
    has other tensors than ``backbone``.
    """
    state, info = read_weights(weights)
    bare_names = bare_backbone(state)
    if bare_names:
        state = {bare: state[name] for name, bare in bare_names.items()}
    fitting, report = fit_weights(
        state,
        backbone.state_dict(),
        file=weights,
        optional_modules=optional_modules(backbone),
    )
    num_loaded = report.num_loaded
    num_tensors = sum(group.num_tensors for group in report.groups.values())
    if num_loaded < num_tensors or report.unexpected:
        raise UserError(
            f"'{weights}' fills {num_loaded} of the {num_tensors} tensors of the config's "
            f"backbone, and has {len(report.unexpected)} more: use the config of these weights "
            "(--config-file)"
        )
    backbone.load_state_dict(fitting, strict=False)
    logger.info(f"'{weights}': {num_loaded}/{num_tensors} backbone tensors")
    return info


def find_feature(backbone: Backbone, wanted: str = "") -> str:
    """Returns the name of the feature map to probe.

    It is ``wanted``, or else the map with the coarsest stride, and of several the last one. Raises
    a ``UserError`` if the backbone has no map ``wanted``.
    """
    strides: dict[str, int] = {}
    for name, shape in backbone.output_shape().items():
        if shape.stride:  # tokens have no stride
            strides[name] = shape.stride
    if not wanted:
        return max(reversed(strides), key=lambda name: strides[name])
    if wanted not in strides:
        raise UserError(f"the backbone has no map '{wanted}', but {', '.join(strides)}")
    return wanted
