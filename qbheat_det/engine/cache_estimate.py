# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What a cache of features is going to take, known from a few views before it is made."""

import logging
import operator
import time
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from detectron2.utils import comm

from qbheat_det.core.errors import UserError
from qbheat_det.data import View, check_space, format_bytes, measure_caches

from .dry_run_report import format_duration
from .feature_build import CachedSet

logger = logging.getLogger(__name__)
_SAMPLED = 32  # views of a set, from all over it
_MAX_SECONDS = 5.0  # for each set, after which no further batch of them is encoded


@dataclass(frozen=True)
class CacheEstimate:
    """What a cache is going to take; several sets of images add up.

    Attributes:
        num_views: of all images.
        num_missing: that are still to be encoded.
        num_bytes: of all features on the disk.
        missing_bytes: of those that are still to be written.
        seconds: that the missing ones take one process.
    """

    num_views: int = 0
    num_missing: int = 0
    num_bytes: float = 0.0
    missing_bytes: float = 0.0
    seconds: float = 0.0

    def __add__(self, other: "CacheEstimate") -> "CacheEstimate":
        return CacheEstimate(*map(operator.add, astuple(self), astuple(other)))


def sample_views(views: Sequence[int]) -> Sequence[int]:
    """Returns a few of them, evenly spread."""
    return views[:: max(1, -(-len(views) // _SAMPLED))]


def estimate_sets(sets: Iterable[CachedSet]) -> CacheEstimate:
    """Encodes a few of the views that each set lacks, on the main process, and keeps nothing.

    Returns:
        What all sets take together, on all processes.

    Raises:
        UserError: a view cannot be encoded.
    """
    found: CacheEstimate | UserError | None = None
    if comm.is_main_process():
        try:
            found = sum(map(_estimate_set, sets), CacheEstimate())
        except UserError as error:  # which the others are to end with, too
            found = error
    found = comm.all_gather(found)[0]
    if isinstance(found, UserError):
        raise found
    assert found is not None
    return found


def _estimate_set(cached: CachedSet) -> CacheEstimate:
    store = cached.store
    files = list(store.folder.glob("*.safetensors"))
    there = sum(file.stat().st_size for file in files)
    # Where there is nothing, nothing is looked for: K may be a number too large to list.
    missing: Sequence[int] = range(store.num_views)
    if files:
        missing = [view for chunk in store.missing() for view in store.views_of(chunk)]
    if not missing:
        return CacheEstimate(store.num_views, num_bytes=there)
    logger.info(f"{cached.title}: a few of {len(missing):,} views, to know what all of them take")
    each, seconds = _measure(cached, sample_views(missing))
    return CacheEstimate(
        num_views=store.num_views,
        num_missing=len(missing),
        num_bytes=there + each * len(missing),
        missing_bytes=each * len(missing),
        seconds=seconds * len(missing),
    )


def _measure(cached: CachedSet, sampled: Sequence[int]) -> tuple[float, float]:
    """Returns bytes and seconds of a view, from as many as there is time for."""
    values = done = 0
    num_parts = -(-len(sampled) // cached.encoder.at_once)
    start = time.perf_counter()
    for part in range(num_parts):
        indices = sampled[part::num_parts]  # from all over the set
        views = cached.encoder([cached.views[index] for index in indices])
        stored = [view for view in views if isinstance(view, View)]
        values += sum(value.numel() for view in stored for value in view.features.values())
        done += len(indices)
        if time.perf_counter() - start > _MAX_SECONDS:
            break
    seconds = time.perf_counter() - start
    return values * cached.store.dtype.itemsize / done, seconds / done


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
