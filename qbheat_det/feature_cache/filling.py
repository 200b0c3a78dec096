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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Protocol

import torch
from detectron2.utils import comm
from filelock import FileLock, Timeout
from torch.utils.data import DataLoader
from tqdm import tqdm

from qbheat_det.core.errors import UserError
from qbheat_det.core.files import check_writable, remove_leftovers, write_atomically
from qbheat_det.data.workers import find_timeout, receive_batches, share_batch

from .store import AllViews, Encode, FeatureStore, Mapped, Stored, naming_the_key

logger = logging.getLogger(__name__)
_META = "meta.json"
_SECONDS_BETWEEN_LINES = 30  # between lines of progress in a log


class Fill(Protocol):
    """A function that completes a store, such as ``fill``."""

    def __call__(
        self, store: FeatureStore, views: AllViews, encode: Encode, *, title: str, num_workers: int
    ) -> FeatureStore:
        """Returns a store that has a view for each index. The arguments are those of ``fill``."""


def fill(
    store: FeatureStore, views: AllViews, encode: Encode, *, title: str, num_workers: int
) -> FeatureStore:
    """Encodes and writes the missing files of a store, and returns it.

    All processes of a run must call this function, and each writes a share of the files. If another
    run is filling the same store, the function waits until the other run finishes or dies.

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
        damaged = [store.path_of(file) for file in missing if store.path_of(file).is_file()]
        if damaged and comm.is_main_process():
            logger.warning(f"'{damaged[0]}' and {len(damaged) - 1} more are damaged: rewritten")
        files = missing[comm.get_rank() :: comm.get_world_size()]  # the share of this process
        readers = find_known_views(store)
        new_indices: list[int] = []  # views that no other store contains
        for file in files:
            new_indices += [index for index in store.views_of(file) if index not in readers]
        loaded = iter(_load(views, new_indices, title=title, num_workers=num_workers))
        for file in files:
            indices = store.views_of(file)
            num_new = sum(index not in readers for index in indices)
            encoded = iter(encode(list(islice(loaded, num_new))))
            stored: list[Stored] = []
            for index in indices:
                if index not in readers:
                    stored.append(next(encoded))
                    continue
                read_from_other_store = readers[index]
                try:
                    stored.append(read_from_other_store())
                except UserError:  # its file was damaged or removed meanwhile
                    stored += encode([views[index]])
            store.write(file, stored)
            if file == files[0]:  # after the first file, the size of the others can be estimated
                store.check_space()
        if new_indices:
            next(loaded, None)  # the progress bar counts a view when the next one is requested
        comm.synchronize()
    return store


def _load(
    views: AllViews, indices: Sequence[int], *, title: str, num_workers: int
) -> Iterable[Mapped]:
    """Yields the views at ``indices``, which worker processes load, with a progress bar."""
    loader: DataLoader[Any] = DataLoader(
        views,
        batch_size=None,
        sampler=indices,
        num_workers=num_workers,
        collate_fn=share_batch,
        timeout=find_timeout(num_workers),
        # Otherwise, the loader would draw from the global generator, and training would change.
        generator=torch.Generator(),
    )
    return tqdm(
        receive_batches(loader),
        desc=f"Encoding the {title}",
        total=len(indices),
        unit=" views",
        mininterval=0.1 if sys.stderr.isatty() else _SECONDS_BETWEEN_LINES,
        disable=not (comm.is_main_process() and indices),
    )


def _share_missing(store: FeatureStore) -> list[int]:
    """Returns the numbers of the missing files, as the main process sees them."""
    missing = []
    if comm.is_main_process():
        missing = store.missing()
    return comm.all_gather(missing)[0]


@contextlib.contextmanager
def _build_lock(store: FeatureStore, waiting: str) -> Iterator[None]:
    """Context in which the main process of this run holds the lock of a store.

    All processes wait for the lock. Another run may hold it for hours, but collective calls time
    out after 30 minutes. Therefore the waiting processes synchronize at regular intervals. At the
    first wait, the log has the message ``waiting``.
    """
    lock = FileLock(store.folder / "build.lock")
    is_main = comm.is_main_process()
    timeout = 0.1  # seconds, for the first try
    has_logged = False
    if is_main:
        with naming_the_key():
            check_writable(store.path_of(0))
    store.folder.mkdir(parents=True, exist_ok=True)
    try:
        while True:
            if is_main:
                with contextlib.suppress(Timeout):
                    lock.acquire(timeout=timeout)
            main_has_lock = comm.all_gather(lock.is_locked)[0]
            if main_has_lock:
                break
            if is_main and not has_logged:
                logger.info(waiting)
                has_logged = True
            timeout = _SECONDS_BETWEEN_LINES
        yield
    finally:
        lock.release()


def find_known_views(store: FeatureStore) -> dict[int, Callable[[], Stored]]:
    """Finds views of a store that other stores contain.

    Returns a dict from the index of such a view to a function that reads it. The other stores are
    in the same parent folder. Their keys, including the root folder of the images, differ from this
    store's key only in the list of records. Records are compared by their hashes.
    """
    if not store.key:
        return {}
    readers: dict[int, Callable[[], Stored]] = {}
    for other_key, other in _find_similar(store, store.key):
        other_rows = {record_hash: row for row, record_hash in enumerate(other_key["records"])}
        missing: set[int] = set()
        for file in other.missing():
            missing.update(other.views_of(file))
        num_views = other_key["views_per_image"]  # the same in both stores
        for row, record_hash in enumerate(store.key["records"]):
            if record_hash not in other_rows:
                continue
            for view_number in range(num_views):
                index = row * num_views + view_number
                other_index = other_rows[record_hash] * num_views + view_number
                if other_index not in missing:
                    readers[index] = functools.partial(other.read, other_index)
    return readers


def _find_similar(
    store: FeatureStore, key: Mapping[str, Any]
) -> Iterator[tuple[dict[str, Any], FeatureStore]]:
    """Yields the other stores beside ``store`` whose keys differ from ``key`` only in the records.

    Yields pairs of a key and its store.
    """
    key_without_records = {**key, "records": None}
    for path in sorted(store.folder.parent.glob(f"*/{_META}")):
        if path.parent == store.folder:
            continue
        # The file may have been removed meanwhile, or belong to another program.
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
            other_key = json.loads(path.read_text(encoding="utf-8"))
            if {**other_key, "records": None} == key_without_records:
                num_views = other_key["views_per_image"] * len(other_key["records"])
                yield other_key, FeatureStore(path.parent, num_views, dtype=store.dtype)
