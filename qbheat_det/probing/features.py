# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What a frozen backbone gives for a set of images, worked out once and kept for many probes."""

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qbheat_det.core.errors import UserError

Describe = Callable[[list[dict[str, Any]]], Mapping[str, Tensor]]
"""From a batch of a mapper's dicts to the outputs of a backbone."""


@dataclass(frozen=True)
class FrozenFeatures:
    """Features of N images, on the CPU.

    Attributes:
        pooled: mean over the positions of the map, (N, C), float32; never rounded further.
        labels: (N,), int64.
        maps: the map itself, (N, C, H, W), of the type that was asked for; None if not kept.
        tokens: (N, M, D), float32; None for a backbone without tokens.
    """

    pooled: Tensor
    labels: Tensor
    maps: Tensor | None = None
    tokens: Tensor | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def joined(self) -> Tensor:
        """What a linear probe reads: ``pooled``, with the first token beside it where there is one.

        As in Table 8 of "Self-Supervised Learning based on Heat Equation". (N, C) or (N, C + D).
        """
        if self.tokens is None:
            return self.pooled
        return torch.cat([self.pooled, self.tokens[:, 0]], dim=1)

    def select(self, places: Tensor) -> "FrozenFeatures":
        """Returns the features of the images at some places, copied."""
        parts = (self.maps, self.tokens)
        maps, tokens = (None if part is None else part[places] for part in parts)
        return FrozenFeatures(self.pooled[places], self.labels[places], maps, tokens)


@torch.no_grad()
def cache_features(
    describe: Describe,
    batches: Iterable[list[dict[str, Any]]],
    *,
    num_images: int,
    feature: str,
    keep_maps: bool = False,
    dtype: torch.dtype = torch.float16,
    memory_gb: float = 8.0,
) -> FrozenFeatures:
    """Runs a backbone once over images.

    A map in float16 is off by at most one part in 2,000, far less than its spread over images; one
    with values beyond float16 is kept in float32.

    Args:
        describe: gives the map (N, C, H, W) under ``feature``, and "tokens" (N, M, D) if any.
        batches: dicts with "label".
        num_images: the most images that may come.
        feature: name of the map.
        keep_maps: whether the map is kept beside its mean.
        dtype: of the maps that are kept.
        memory_gb: what these may take, in GB.

    Raises:
        UserError: the maps would take more.
    """
    pooled, tokens = [torch.empty(0, 0)], []
    labels: list[int] = []
    maps: Tensor | None = None
    for batch in batches:
        outputs = describe(batch)
        found = outputs[feature].float()
        if keep_maps:
            maps = _put(maps, found, len(labels), num_images, dtype, memory_gb)
        pooled.append(found.mean(dim=(2, 3)).cpu())
        if "tokens" in outputs:
            tokens.append(outputs["tokens"].float().cpu())
        labels += [entry["label"] for entry in batch]
    return FrozenFeatures(
        torch.cat(pooled[1:] or pooled),
        torch.tensor(labels, dtype=torch.long),
        None if maps is None else maps[: len(labels)],
        torch.cat(tokens) if tokens else None,
    )


def _put(
    maps: Tensor | None,
    found: Tensor,
    place: int,
    num_images: int,
    dtype: torch.dtype,
    memory_gb: float,
) -> Tensor:
    """Writes maps into the one tensor that holds all, which is made for the first of them."""
    # Compared as a whole: a conversion beyond the range gives infinity.
    fits = bool(found.abs().amax() <= torch.finfo(dtype).max)
    if maps is None or not (fits or maps.dtype is torch.float32):
        kept = dtype if fits else torch.float32
        _check_memory(num_images * found[0].numel() * kept.itemsize / 1e9, memory_gb, num_images)
        before = maps
        maps = torch.empty((num_images, *found.shape[1:]), dtype=kept)
        if before is not None:
            maps[:place] = before[:place]
    maps[place : place + len(found)] = found.cpu()
    return maps


def _check_memory(needed: float, memory_gb: float, num_images: int) -> None:
    if needed > memory_gb:
        raise UserError(
            f"the maps of {num_images:,} images would take {needed:.1f} GB of memory, more than "
            f"the {memory_gb:.1f} GB allowed: allow more with --memory-gb, take fewer images or a "
            "smaller map, or probe without tran-1 and tran-4, which alone need maps"
        )


def split_by_class(labels: Tensor, *, share: float = 0.2, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Divides images at random, each class in the same proportion.

    Of a class of at least two images, at least one is on either side; a class of one image is not
    set aside, or nothing could be learned of it.

    Args:
        labels: (N,).
        share: of each class that is set aside, rounded.
        seed: of the draw; equal seeds and labels give equal parts.

    Returns:
        The places of the images that remain and of those set aside, each rising.
    """
    draw = random.Random(seed)
    aside: list[int] = []
    for label in labels.unique().tolist():
        places = (labels == label).nonzero()[:, 0].tolist()
        if len(places) > 1:
            wanted = min(max(1, round(share * len(places))), len(places) - 1)
            aside += draw.sample(places, wanted)
    is_aside = torch.zeros(len(labels), dtype=torch.bool)
    is_aside[aside] = True
    return (~is_aside).nonzero()[:, 0], is_aside.nonzero()[:, 0]
