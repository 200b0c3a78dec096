# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Whether a cache of features fits on its disk."""

import shutil
from pathlib import Path

from qbheat_det.core.errors import UserError
from qbheat_det.core.text import format_bytes


def check_space(folder: Path, needed: float) -> int:
    """Checks, before anything is computed, that a cache fits on its disk.

    Args:
        folder: of the cache; it need not exist.
        needed: bytes that are still to be written.

    Returns:
        Free bytes of the disk.

    Raises:
        UserError: there are fewer than needed.
    """
    free = _free_bytes(folder)
    if free < needed:
        raise UserError(explain_full_disk(folder, needed))
    return free


def explain_full_disk(folder: Path, needed: float) -> str:
    """Returns the message for a disk that has no room for ``needed`` further bytes."""
    return (
        f"the features to cache need {format_bytes(needed)}, but the disk of '{folder}' has "
        f"{format_bytes(_free_bytes(folder))} free: free some space, set "
        "MODEL.CACHE_FEATURES.FOLDER to a folder on another disk, or lower "
        "INPUT.FIXED_VIEWS.COUNT, by which they grow (DTYPE float32 takes twice what float16 does)"
    )


def _free_bytes(folder: Path) -> int:
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return shutil.disk_usage(there).free
