# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Whether a cache of features fits on its disk, and what others of them take."""

import shutil
from pathlib import Path

from qbheat_det.core.errors import UserError

_GIB = 2**30


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
    """Returns the sentence for a disk that has no room for ``needed`` further bytes."""
    return (
        f"the features to cache need {format_bytes(needed)}, but the disk of '{folder}' has "
        f"{format_bytes(_free_bytes(folder))} free: free some space, set "
        "MODEL.CACHE_FEATURES.FOLDER to a folder on another disk, or lower "
        "INPUT.FIXED_VIEWS.COUNT, by which they grow (DTYPE float32 takes twice what float16 does)"
    )


def measure_caches(root: Path) -> dict[str, int]:
    """Returns the bytes that each cache below a folder takes, by name."""
    if not root.is_dir():
        return {}
    return {
        folder.name: sum(_size(file) for file in folder.iterdir())
        for folder in sorted(root.iterdir())
        if (folder / "meta.json").is_file()
    }


def format_bytes(count: float) -> str:
    """Returns "1.23 GiB (1,320,702,444 bytes)"."""
    return f"{count / _GIB:.2f} GiB ({count:,.0f} bytes)"


def _free_bytes(folder: Path) -> int:
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return shutil.disk_usage(there).free


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:  # a temporary name that is gone by now
        return 0
