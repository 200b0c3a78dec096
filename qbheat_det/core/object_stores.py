# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Reads files of object stores, such as s3://bucket/a.jpg, with fsspec."""

import contextlib
import functools
import hashlib
import json
import os
import shutil
from collections.abc import Collection
from pathlib import Path, PurePosixPath
from typing import Any

from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

from .errors import UserError
from .files import file_lock, get_cache_dir, write_atomically
from .text import format_bytes, one_line

_DATA_SETS = "hf://datasets/"
_BATCH = 256  # files that are downloaded together
_MARKS = ("ETag", "etag", "md5Hash", "mtime", "LastModified", "last_modified", "created")

PREFIXES = ("s3://", "gs://", "gcs://", "az://", "abfs://", "memory://")
"""Addresses that Detectron2's path manager opens with fsspec."""


def is_remote(path: object) -> bool:
    """Whether a path is an address such as s3://bucket/folder."""
    return str(path).startswith(PREFIXES)


def open_store(address: str) -> tuple[Any, str]:
    """Returns fsspec's file system for an address, and the path in this file system.

    Raises a ``UserError`` if the library of the store is not installed.
    """
    import fsspec  # most predictions need none

    try:
        return fsspec.url_to_fs(address)
    except (ImportError, ValueError) as error:
        raise UserError(f"'{address}' cannot be opened: {one_line(error)}") from error


def list_store(address: str, suffixes: Collection[str]) -> list[str]:
    """Lists the addresses of the files in a folder and its subfolders that have a suffix.

    If ``address`` is a file, it is listed alone. Raises a ``UserError`` if there are none, or if
    the store refuses.
    """
    filesystem, name = open_store(address)
    try:
        names = filesystem.find(name)
    except Exception as error:  # of any store's library
        raise UserError(f"'{address}' cannot be listed: {one_line(error)}") from error
    found = [one for one in names if one.lower().endswith(tuple(suffixes))]
    if not found:
        raise UserError(f"'{address}' has no files with a suffix of {', '.join(sorted(suffixes))}")
    return [str(filesystem.unstrip_protocol(one)) for one in sorted(found)]


@functools.cache  # a process lists an address once
def fetch(path: str) -> str:
    """Downloads a file or folder of an object store to the cache, and returns its local path.

    Files that are in the cache and unchanged are not downloaded again, so an interrupted download
    continues. Files that are no longer in the store are deleted from the cache. A path that is not
    an address is returned unchanged.

    Raises:
        UserError: the store refuses or has no such file, the disk is too small, or a file would be
            written outside of the cache.
    """
    if not (is_remote(path) or path.startswith(_DATA_SETS)):
        return path
    filesystem, root = open_store(path)
    digest = hashlib.sha256(path.encode()).hexdigest()[:16]
    folder = get_cache_dir() / "fetched" / f"{PurePosixPath(root).name}_{digest}"
    with file_lock(f"{folder}.lock", f"Waiting for another process that downloads '{path}'"):
        try:
            is_file = filesystem.isfile(root)
            found = filesystem.find(root, detail=True)
            # A name that ends in "/" marks a folder, as the web pages of stores make it.
            names = {
                _relative_name(name, root, path): name for name in found if not name.endswith("/")
            }
            _download(filesystem, folder, names, found, path)
        except (UserError, KeyboardInterrupt):
            raise
        except Exception as error:  # of any store's library
            raise UserError(f"'{path}' cannot be downloaded: {one_line(error)}") from error
    if is_file:
        return str(folder / PurePosixPath(root).name)
    return str(folder)


def _relative_name(name: str, root: str, address: str) -> str:
    """Returns the path of a file relative to the folder ``root``, or a file's own name."""
    relative = PurePosixPath(name.strip("/"))
    base = PurePosixPath(root.strip("/"))
    if relative == base:
        return relative.name
    relative = relative.relative_to(base)
    if ".." in relative.parts:
        raise UserError(f"'{address}' has a file '{name}', whose name leaves the folder: rename it")
    return str(relative)


def _download(
    filesystem: Any, folder: Path, names: dict[str, str], found: dict[str, Any], address: str
) -> None:
    """Brings a folder of the cache up to date.

    ``names`` maps local names to names in the store, and ``found`` maps these to their properties.
    """
    if not names:
        raise UserError(f"'{address}' does not exist, or has no files")
    record = folder.with_name(f"{folder.name}.json")  # size and version of each downloaded file
    known: Any = {}
    if record.is_file():
        with contextlib.suppress(ValueError):  # damaged: all files are downloaded again
            known = json.loads(record.read_text("utf-8"))
        if not isinstance(known, dict):
            known = {}
    versions = {}
    for local, name in names.items():
        for parent in PurePosixPath(local).parents:
            if str(parent) in names:
                raise UserError(
                    f"'{address}' has a file '{parent}' and files in a folder of this name, which "
                    "cannot be on a disk together: rename one of them"
                )
        info = found[name]
        marks = [str(info[mark]) for mark in _MARKS if info.get(mark)]
        versions[local] = "|".join([str(info.get("size")), *marks])
    missing = []
    for local, name in names.items():
        is_known = known.get(local) == versions[local] and (folder / local).is_file()
        if is_known and found[name].get("size") is not None:
            is_known = found[name]["size"] == (folder / local).stat().st_size
        if not is_known:
            missing.append(local)
    # Also those of an interrupted download, which are not in the record.
    for path in list(folder.rglob("*")):
        if path.is_file() and path.relative_to(folder).as_posix() not in names:
            path.unlink()
    known = {local: known[local] for local in names if local in known and local not in missing}
    size = sum(found[names[local]].get("size") or 0 for local in missing)
    folder.mkdir(parents=True, exist_ok=True)
    # Before a file changes, so that an interrupted download leaves no wrong version in the record.
    write_atomically(record, json.dumps(known).encode())
    free = shutil.disk_usage(folder).free
    if size > free:
        raise UserError(f"'{address}' has {format_bytes(size)}, but {format_bytes(free)} are free")
    # Complete files are moved to the folder, so a process that reads an old file can finish.
    incomplete = folder.with_name(f"{folder.name}.incomplete")
    with (
        tqdm(total=len(missing), unit="file", desc="downloading", disable=None) as bar,
        contextlib.ExitStack() as stack,
    ):
        stack.callback(shutil.rmtree, incomplete, ignore_errors=True)
        for start in range(0, len(missing), _BATCH):
            batch = missing[start : start + _BATCH]
            shutil.rmtree(incomplete, ignore_errors=True)
            incomplete.mkdir()
            downloads = [incomplete / str(number) for number in range(len(batch))]
            filesystem.get([names[local] for local in batch], [str(path) for path in downloads])
            for download, local in zip(downloads, batch, strict=True):
                _move(download, folder / local)
            known.update({local: versions[local] for local in batch})
            write_atomically(record, json.dumps(known).encode())
            bar.update(len(batch))


def _move(path: Path, target: Path) -> None:
    """Moves a file to ``target``, and replaces what is there."""
    if target.is_dir():  # a folder without files since this name is a file's
        shutil.rmtree(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    os.replace(path, target)
