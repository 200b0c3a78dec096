# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Encodes the missing views of a store.

An interrupted build resumes where it stopped. All processes of a run fill a store together. Other
runs that need the same store wait. Views that another store contains are copied, so if a data set
gets more images or corrected boxes, only the new and changed images are encoded.
"""

import contextlib
import functools
import json
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Protocol

import torch
from detectron2.data.build import trivial_batch_collator
from detectron2.utils import comm
from filelock import FileLock, Timeout
from torch.utils.data import DataLoader
from tqdm import tqdm

from qbheat_det.core.errors import UserError
from qbheat_det.core.files import check_writable, remove_leftovers, write_atomically

from .store import AllViews, Encode, FeatureStore, Mapped, Stored, naming_the_key

logger = logging.getLogger(__name__)
_META = "meta.json"
_SECONDS_BETWEEN_LINES = 30  # between lines of progress in a log


class Fill(Protocol):
    """A function that completes a store, such as ``fill``."""

    def __call__(
        self, store: FeatureStore, views: AllViews, encode: Encode, *, title: str, num_workers: int
    ) -> FeatureStore:
        """Returns a store that has a view for each index. For the arguments, see ``fill``."""


def fill(
    store: FeatureStore, views: AllViews, encode: Encode, *, title: str, num_workers: int
) -> FeatureStore:
    """Encodes and writes the missing files of a store, and returns it.

    All processes of a run must call this function. If another run is filling the same store, the
    function waits until the other run finishes or dies.

    Args:
        store: the store to fill.
        views: the views to encode, with the same indices as in the store.
        encode: maps outputs of a mapper to views.
        title: the data set, in progress bars and logs.
        num_workers: number of worker processes that load views.

    Raises:
        UserError: the folder is not writable, the disk is too small, or a feature is not finite.
    """
    logger.info(f"The {title}: cached in '{store.folder}'")
    if not _share_missing(store):
        return store
    with _build_lock(store, f"Waiting for another run that encodes the {title}"):
        remove_leftovers(store.folder)
        if store.key and comm.is_main_process():
            key = json.dumps(store.key, indent=2, sort_keys=True)
            write_atomically(store.folder / _META, key.encode())
        missing = _share_missing(store)
        damaged = [path for path in map(store.path_of, missing) if path.is_file()]
        if damaged and comm.is_main_process():
            logger.warning(f"'{damaged[0]}' and {len(damaged) - 1} more are damaged: rewritten")
        files = missing[comm.get_rank() :: comm.get_world_size()]
        known = find_known_views(store)
        new = [index for file in files for index in store.views_of(file) if index not in known]
        loaded = iter(_load(views, new, title=title, num_workers=num_workers))
        for file in files:
            indices = store.views_of(file)
            num_new = sum(index not in known for index in indices)
            encoded = iter(encode(list(islice(loaded, num_new))))
            stored = []
            for index in indices:
                if index not in known:
                    stored.append(next(encoded))
                    continue
                try:
                    stored.append(known[index]())
                except UserError:  # damaged, or removed meanwhile
                    stored += encode([views[index]])
            store.write(file, stored)
            if file == files[0]:  # the size of this file indicates the size of all files
                store.check_space()
        comm.synchronize()
    return store


def _load(
    views: AllViews, indices: Sequence[int], *, title: str, num_workers: int
) -> Iterable[Mapped]:
    """Loads views in worker processes, and shows a progress bar on the main process."""
    loader: DataLoader[Any] = DataLoader(
        views,
        batch_size=None,
        sampler=indices,
        num_workers=num_workers,
        collate_fn=trivial_batch_collator,
        generator=torch.Generator(),  # the default draws from the global generator
    )
    return tqdm(
        loader,
        desc=f"Encoding the {title}",
        total=len(indices),
        unit=" views",
        mininterval=0.1 if sys.stderr.isatty() else _SECONDS_BETWEEN_LINES,
        disable=not (comm.is_main_process() and indices),
    )


def _share_missing(store: FeatureStore) -> list[int]:
    """Returns the numbers of the files that are missing on the main process's disk."""
    missing = []
    if comm.is_main_process():
        missing = store.missing()
    return comm.all_gather(missing)[0]


@contextlib.contextmanager
def _build_lock(store: FeatureStore, waiting: str) -> Iterator[None]:
    """Holds the lock of a store on the main process, while the other processes wait.

    Another run may hold the lock for hours. Since a collective call times out after 30 minutes, the
    waiting processes synchronize at regular intervals.
    """
    lock = FileLock(store.folder / "build.lock")
    is_main = comm.is_main_process()
    seconds = 0.1
    if is_main:
        with naming_the_key():
            check_writable(store.path_of(0))
    store.folder.mkdir(parents=True, exist_ok=True)
    try:
        while True:
            if is_main:
                with contextlib.suppress(Timeout):
                    lock.acquire(timeout=seconds)
            if comm.all_gather(lock.is_locked)[0]:
                break
            if is_main and seconds < 1:
                logger.info(waiting)
            seconds = _SECONDS_BETWEEN_LINES
        yield
    finally:
        lock.release()


def find_known_views(store: FeatureStore) -> dict[int, Callable[[], Stored]]:
    """Maps indices of a store's views to functions that read them from other stores.

    The other stores are in the same folder. A view depends on its record, and on the key without
    the list of records. So stores whose keys, including the root folder of the images, differ only
    in this list share views.
    """
    known: dict[int, Callable[[], Stored]] = {}
    for key, other in _find_similar(store):
        other_rows = {record: row for row, record in enumerate(key["records"])}
        missing = {index for file in other.missing() for index in other.views_of(file)}
        count = key["views_per_image"]
        for row, record in enumerate((store.key or {})["records"]):
            if record not in other_rows:
                continue
            for number in range(count):
                other_index = other_rows[record] * count + number
                if other_index not in missing:
                    known[row * count + number] = functools.partial(other.read, other_index)
    return known


def _find_similar(store: FeatureStore) -> Iterator[tuple[dict[str, Any], FeatureStore]]:
    """Yields the keys and stores in the same folder whose key differs only in the records."""
    if not store.key:
        return
    shared_key = {**store.key, "records": None}
    for path in sorted(store.folder.parent.glob(f"*/{_META}")):
        # It may have been removed meanwhile, or belong to another program.
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
            key = json.loads(path.read_text(encoding="utf-8"))
            if path.parent != store.folder and {**key, "records": None} == shared_key:
                num_views = key["views_per_image"] * len(key["records"])
                yield key, FeatureStore(path.parent, num_views, dtype=store.dtype)
