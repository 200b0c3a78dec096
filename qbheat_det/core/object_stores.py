# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Reads files of object stores, such as s3://bucket/a.jpg, with fsspec."""

from collections.abc import Collection
from typing import IO, Any

import fsspec
from detectron2.utils.file_io import PathManager
from iopath.common.file_io import PathHandler

from .errors import UserError
from .text import one_line

PREFIXES = ("s3://", "gs://", "gcs://", "az://", "abfs://", "memory://")
"""Addresses that Detectron2's path manager opens with fsspec."""


class ObjectStores(PathHandler):
    """Opens addresses for Detectron2's path manager, which opens all images."""

    def _get_supported_prefixes(self) -> list[str]:
        return list(PREFIXES)

    def _open(self, path: str, mode: str = "r", buffering: int = -1, **kwargs: Any) -> IO[Any]:
        filesystem, name = open_store(path)
        return filesystem.open(name, mode)

    def _exists(self, path: str, **kwargs: Any) -> bool:
        filesystem, name = open_store(path)
        return bool(filesystem.exists(name))


def is_remote(path: object) -> bool:
    """Whether a path is an address such as s3://bucket/folder."""
    return str(path).startswith(PREFIXES)


def open_store(address: str) -> tuple[Any, str]:
    """Returns fsspec's file system for an address, and the path in this file system.

    Raises a ``UserError`` if the library of the store is not installed.
    """
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


PathManager.register_handler(ObjectStores())
