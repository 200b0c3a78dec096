# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Detectron2's path manager, which opens files of object stores too once this is imported."""

from typing import IO, Any

from detectron2.utils.file_io import PathManager
from iopath.common.file_io import PathHandler

from .object_stores import PREFIXES, open_store

__all__ = ["PathManager"]


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


PathManager.register_handler(ObjectStores())
