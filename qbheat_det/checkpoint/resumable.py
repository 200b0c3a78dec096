# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Which checkpoints of a run can be resumed from: those that are whole."""

import os
import zipfile
from collections.abc import Collection, Sequence
from typing import Any

from qbheat_det.core.errors import UserError

from .weights_file import check_weights_file, load_pytorch


def find_fault(path: str) -> str:
    """Returns what is wrong with a checkpoint, or nothing; reads it all, so that damage shows."""
    try:
        _read(path)
    except UserError as error:
        return str(error)
    return ""


def newest_whole(paths: Sequence[str], *, needs: Collection[str] = ()) -> str:
    """Returns the whole checkpoint of the highest iteration, or nothing.

    Args:
        paths: files to choose from; others' weights among them are passed over.
        needs: keys that the checkpoint must have besides "model" and "iteration".
    """
    found: list[tuple[int, str]] = []
    for path in paths:
        try:
            content = _read(path)
        except UserError:
            continue
        iteration = content.get("iteration")
        if isinstance(iteration, int) and {"model", *needs} <= content.keys():
            found.append((iteration, path))
    return max(found, default=(0, ""))[1]


def _read(path: str) -> dict[str, Any]:
    """The content of a checkpoint, its tensors left on the disk."""
    check_weights_file(path)
    content = load_pytorch(path, mmap=True)
    damaged = zipfile.ZipFile(path).testzip() if zipfile.is_zipfile(path) else None
    if damaged:
        raise UserError(f"'{os.fspath(path)}' is damaged at '{damaged}'")
    if not isinstance(content, dict):
        raise UserError(f"'{path}' holds no checkpoint")
    return content
