# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What a cache of features is going to take, known from a few views before it is made."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from detectron2.utils import comm

from qbheat_det.data import (
    FeatureStore,
    FixedViews,
    View,
    check_space,
    format_bytes,
    measure_caches,
)

from .dry_run_report import format_duration
from .feature_build import Mapped, ViewEncoder

logger = logging.getLogger(__name__)
_SAMPLED = 32  # views, from all over the set


@dataclass(frozen=True)
class CacheEstimate:
    """What a cache is going to take; the sum of several sets of images adds up.

    Attributes:
        num_views: of all images.
        num_missing: that are still to be encoded.
        num_bytes: of all features on the disk.
        seconds: that the missing ones take one process.
    """

    num_views: int = 0
    num_missing: int = 0
    num_bytes: float = 0.0
    seconds: float = 0.0

    def __add__(self, other: "CacheEstimate") -> "CacheEstimate":
        return CacheEstimate(
            self.num_views + other.num_views,
            self.num_missing + other.num_missing,
            self.num_bytes + other.num_bytes,
            self.seconds + other.seconds,
        )

    @property
    def missing_bytes(self) -> float:
        """Bytes that are still to be written."""
        return self.num_bytes * self.num_missing / max(1, self.num_views)


@dataclass
class CachedSet:
    """A set of images, their views, and where the features of these are.

    Attributes:
        title: what is done to it, for the log.
        records: numbered, see ``qbheat_det.data.number_records``.
        views: of the records.
        store: of as many views.
        encoder: of the views.
    """

    title: str
    records: Sequence[dict[str, Any]]
    views: FixedViews
    store: FeatureStore
    encoder: ViewEncoder

    def __getitem__(self, index: int) -> Mapped:
        """Draws a view."""
        row, number = divmod(index, self.views.count)
        return self.views.view(self.records[row], number)


def sample_views(views: Sequence[int]) -> Sequence[int]:
    """Returns a few of them, evenly spread."""
    return views[:: max(1, -(-len(views) // _SAMPLED))]


def estimate_set(cached: CachedSet) -> CacheEstimate:
    """Encodes a few of the views that a set lacks, and keeps nothing."""
    store = cached.store
    missing = [view for chunk in store.missing() for view in store.views_of(chunk)]
    whole = CacheEstimate(store.num_views, num_missing=len(missing))
    if not missing:
        files = store.folder.glob("*.safetensors")
        return replace(whole, num_bytes=sum(file.stat().st_size for file in files))
    sampled = sample_views(missing)
    start = time.perf_counter()
    views = cached.encoder([cached[index] for index in sampled])
    seconds = (time.perf_counter() - start) / len(sampled)
    stored = [view for view in views if isinstance(view, View)]
    values = sum(value.numel() for view in stored for value in view.features.values())
    each = values * store.dtype.itemsize / len(sampled)
    return replace(whole, num_bytes=each * store.num_views, seconds=seconds * len(missing))


def tell_estimate(estimate: CacheEstimate, folder: Path, *, used: Sequence[str]) -> None:
    """Says where the caches are, what they take, and what others beside them do.

    Args:
        estimate: of all caches of the run.
        folder: of all caches.
        used: names of those of the run.

    Raises:
        UserError: the disk has no room for what is missing.
    """
    free = check_space(folder, estimate.missing_bytes)
    if not comm.is_main_process():
        return
    logger.info(
        f"Cached features of {estimate.num_views:,} views in '{folder}' ({', '.join(used)}): "
        f"{format_bytes(estimate.num_bytes)}, free are {format_bytes(free)}"
    )
    if estimate.num_missing:
        seconds = estimate.seconds / comm.get_world_size()
        logger.info(
            f"{estimate.num_missing:,} views are to be encoded: about {format_duration(seconds)}"
        )
    others = {name: size for name, size in measure_caches(folder).items() if name not in used}
    if others:
        logger.info(
            f"{len(others)} other caches in '{folder}', of other weights, images or settings, take "
            f"{format_bytes(sum(others.values()))}; each is a folder that can be removed"
        )
