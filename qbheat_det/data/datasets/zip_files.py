# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Unpacks zips into the cache folder."""

import hashlib
import os
import shutil
import tempfile
import zipfile
from pathlib import Path

from qbheat_det.core.errors import UserError, refuse_unreadable
from qbheat_det.core.files import file_lock, get_cache_dir
from qbheat_det.core.object_stores import fetch
from qbheat_det.core.text import format_bytes

_MAX_EXPANSION = 200  # ratio of the unpacked size to the size of a zip


def unpack(path: str) -> str:
    """Unpacks a zip into the cache folder, if this has not been done before.

    Downloads the data at an address such as s3://bucket/folder or s3://bucket/set.zip first.

    Returns the folder that has the content. If the zip has a single folder on top, returns this
    folder. Returns a path that is no zip unchanged.

    Raises:
        UserError: the file is not a valid zip, or is too large for the disk.
    """
    path = fetch(path)
    if not (path.lower().endswith(".zip") and os.path.isfile(path)):
        return path
    state = os.stat(path)
    identity = f"{os.path.abspath(path)}|{state.st_size}|{state.st_mtime_ns}"
    digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
    folder = get_cache_dir() / "unpacked" / f"{Path(path).stem}_{digest}"
    if not folder.is_dir():
        lock = folder.with_name(f".{folder.name}.lock")
        with (
            refuse_unreadable(path),
            file_lock(lock, f"Waiting for another process that unpacks '{path}'"),
        ):
            if not folder.is_dir():
                _extract(path, folder)
    inner = [entry for entry in folder.iterdir() if not entry.name.startswith((".", "__MACOSX"))]
    if len(inner) == 1:
        return str(inner[0])
    return str(folder)


def _extract(path: str, folder: Path) -> None:
    """Unpacks a zip, so that the folder is complete once it exists.

    Raises a ``UserError`` if the content is too large for the disk, or for an honest zip.
    """
    with (
        zipfile.ZipFile(path) as archive,
        tempfile.TemporaryDirectory(prefix=".zip_", dir=folder.parent) as partial,
    ):
        size = sum(entry.file_size for entry in archive.infolist())  # bytes
        free = shutil.disk_usage(partial).free
        if size > free or size > _MAX_EXPANSION * os.path.getsize(path):
            raise UserError(f"'{path}' would unpack to {format_bytes(size)}")
        archive.extractall(Path(partial, "set"))  # drops ".." and absolute paths
        os.replace(Path(partial, "set"), folder)
