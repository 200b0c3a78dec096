# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What a frozen encoder made of every view of a data set, on the disk.

A folder of files of 32 views each. A file takes its name when it is whole, so that a build that
was interrupted goes on where it was, and processes share the work and the result: each file is
claimed with a lock, which the system frees when its holder ends, however that happens.
"""

import contextlib
import errno
import json
import logging
import os
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from qbheat_det.core.errors import UserError
from qbheat_det.core.files import write_atomically

from .cache_space import explain_full_disk
from .feature_chunk import FeatureChunk, Stored, pack_views
from .feature_key import name_cache

if sys.platform != "win32":
    import fcntl

logger = logging.getLogger(__name__)

VIEWS_PER_CHUNK = 32
_OPEN_CHUNKS = 1024  # headers of files that a process keeps
_FULL = (errno.ENOSPC, errno.EDQUOT)


class FeatureStore:
    """Views by their index; of K views of each image, view k of row r has the index r * K + k."""

    def __init__(
        self, folder: str | os.PathLike[str], num_views: int, *, dtype: torch.dtype = torch.float16
    ) -> None:
        """
        Args:
            folder: its name is that of the cache, which every file repeats.
            num_views: of all images.
            dtype: that features are written in.
        """
        self.folder = Path(folder)
        self.num_views = num_views
        self.dtype = dtype
        self._whole: set[int] = set()
        self._open: OrderedDict[int, FeatureChunk] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        # A spawned worker reads the headers itself.
        return {**self.__dict__, "_open": OrderedDict()}

    @property
    def num_chunks(self) -> int:
        """Number of files."""
        return -(-self.num_views // VIEWS_PER_CHUNK)

    def views_of(self, chunk: int) -> range:
        """Returns the indices of the views of a file."""
        first = chunk * VIEWS_PER_CHUNK
        return range(first, min(first + VIEWS_PER_CHUNK, self.num_views))

    def path_of(self, chunk: int) -> Path:
        """Returns the name of a file."""
        return self.folder / f"{chunk:06d}.safetensors"

    def missing(self) -> list[int]:
        """Returns the chunks that are not there; a file that is damaged or foreign is not."""
        return [chunk for chunk in range(self.num_chunks) if not self._is_whole(chunk)]

    def read(self, view_index: int) -> Stored:
        """Returns a view, or what the mapper gave in its place.

        Raises:
            IndexError: there is no such view.
            UserError: its file is gone, or damaged.
        """
        if not 0 <= view_index < self.num_views:
            raise IndexError(f"view {view_index} of {self.num_views}")
        number = view_index // VIEWS_PER_CHUNK
        try:
            chunk = self._open.pop(number, None) or self._load(number)
            view = chunk.read(view_index)
        except ValueError as error:
            raise UserError(
                f"the cached features in '{self.folder}' are no longer whole: {error}; remove that "
                "file, if it is there, and start the run again, with --resume to go on: it is made "
                "again"
            ) from error
        self._open[number] = chunk  # the last to go
        if len(self._open) > _OPEN_CHUNKS:
            self._open.popitem(last=False)
        return view

    def write(self, chunk: int, views: Sequence[Stored]) -> None:
        """Writes the views of a file, whole or not at all.

        Raises:
            UserError: the disk is full, the folder cannot be written, or a feature is not finite
                in the store's dtype.
        """
        indices = self.views_of(chunk)
        content = pack_views(
            dict(zip(indices, views, strict=True)), cache=self.folder.name, dtype=self.dtype
        )
        try:
            write_atomically(self.path_of(chunk), lambda stream: stream.write(content))
        except UserError as error:
            if isinstance(error.__cause__, OSError) and error.__cause__.errno in _FULL:
                left = self.num_chunks - len(self._whole)
                raise UserError(explain_full_disk(self.folder, left * len(content))) from error
            raise _naming_the_key(error) from error
        self._open.pop(chunk, None)
        self._whole.add(chunk)

    @contextlib.contextmanager
    def claim(self, chunk: int) -> Iterator[bool]:
        """Yields whether this process is to write a chunk: it is missing and no one else does."""
        if self._is_whole(chunk):
            yield False
            return
        with _locked(self.path_of(chunk).with_suffix(".lock")) as path:
            # Another may have written it since, and have let go.
            yield path is not None and not self._is_whole(chunk)
            if path is not None and self._is_whole(chunk):
                # Who waits for the lock of a file that is gone finds the chunk written.
                path.unlink(missing_ok=True)

    def _is_whole(self, chunk: int) -> bool:
        if chunk in self._whole:
            return True
        if not self.path_of(chunk).is_file():
            return False
        try:
            self._load(chunk)
        except ValueError as error:
            logger.warning(f"Cached features are made again: {error}")
            return False
        self._whole.add(chunk)
        return True

    def _load(self, chunk: int) -> FeatureChunk:
        return FeatureChunk(self.path_of(chunk), cache=self.folder.name, views=self.views_of(chunk))


def open_feature_store(
    root: str | os.PathLike[str],
    description: Mapping[str, Any],
    num_views: int,
    *,
    dtype: torch.dtype = torch.float16,
) -> FeatureStore:
    """Opens the cache of a description below ``root``, and writes it into ``meta.json`` there.

    Args:
        root: folder of all caches.
        description: see ``describe_cache``.
        num_views: of all images.
        dtype: of the features.

    Raises:
        UserError: the folder cannot be written.
    """
    folder = Path(root) / name_cache(description)
    text = json.dumps(description, indent=2, sort_keys=True)
    if not (folder / "meta.json").is_file():
        try:
            write_atomically(folder / "meta.json", lambda stream: stream.write(text.encode()))
        except UserError as error:
            raise _naming_the_key(error) from error
    return FeatureStore(folder, num_views, dtype=dtype)


def _naming_the_key(error: UserError) -> UserError:
    return UserError(
        f"{error}: set MODEL.CACHE_FEATURES.FOLDER to a folder that features can be cached in"
    )


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[Path | None]:
    """Yields the path if its lock is ours now, or None if another process holds it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise UserError(
            f"cannot write the cache of features to '{path.parent}' ({error.strerror or error}): "
            "set MODEL.CACHE_FEATURES.FOLDER to a folder that can be written"
        ) from error
    try:
        yield path if _try_lock(descriptor) else None
    finally:
        # Not by closing alone: a worker forked meanwhile has the file open, too.
        _unlock(descriptor)
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    if sys.platform == "win32":
        return True  # two processes may do the same work, and both write the same
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # not every file system has locks
    return True


def _unlock(descriptor: int) -> None:
    if sys.platform != "win32":
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
