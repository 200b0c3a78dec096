# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Moves caches to a temporary folder if the home folder is missing or read-only.

In such a home folder, which is common in containers, this package and several libraries would fail
or print warnings.
"""

import logging
import os
import stat
import tempfile
from collections.abc import MutableMapping
from pathlib import Path

logger = logging.getLogger(__name__)
# Environment variables for the cache folders of libraries, and the default folders.
_LIBRARIES = {
    "FVCORE_CACHE": "~/.torch/iopath_cache",
    "MPLCONFIGDIR": "~/.config/matplotlib",
    "TRITON_CACHE_DIR": "~/.triton",
    "XDG_CACHE_HOME": "~/.cache",
}


def use_writable_caches(environ: MutableMapping[str, str] = os.environ) -> None:
    """Sets environment variables so that all caches are in folders that can be written.

    If this package's cache folder cannot be written, ``QBHEAT_CACHE`` is set to a temporary folder,
    and a warning is logged. If the default cache folder of a library cannot be written, its
    variable is set to a subfolder of this package's cache folder. Variables that are already set do
    not change. Child processes inherit the variables.

    Args:
        environ: the environment variables, which are changed.
    """
    # The same folder as ``get_cache_dir`` returns. "~" remains if the user has no home folder.
    base = environ.get("XDG_CACHE_HOME") or "~/.cache"
    cache = Path(os.path.expanduser(environ.get("QBHEAT_CACHE") or f"{base}/qbheat_det"))
    if not _is_writable(cache):
        try:
            temporary = _make_temporary_folder()
        except OSError:  # without a temporary folder, nothing can be improved
            return
        if not environ.get("QBHEAT_CACHE"):
            environ["QBHEAT_CACHE"] = str(temporary)
            logger.warning(
                f"The cache folder '{cache}' cannot be written, so '{temporary}' is used: set "
                "QBHEAT_CACHE to choose another one"
            )
        cache = temporary
    for variable, default in _LIBRARIES.items():
        if variable not in environ and not _is_writable(Path(os.path.expanduser(default))):
            environ[variable] = str(cache / variable.lower())


def _is_writable(folder: Path) -> bool:
    """Returns whether files can be created in a folder.

    If the folder does not exist, the innermost parent that exists is checked.
    """
    if folder.parts[:1] == ("~",):  # the user has no home folder
        return False
    try:
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        with tempfile.TemporaryFile(dir=existing):
            return True
    except (OSError, StopIteration):
        return False


def _make_temporary_folder() -> Path:
    """Returns a temporary folder for this user. All processes of the user share it.

    If another user owns the folder or can write to it, returns a new one. Otherwise, that user
    could place programs into the caches, which would then be executed.
    """
    if hasattr(os, "getuid"):
        folder = Path(tempfile.gettempdir()) / f"qbheat_det_{os.getuid()}"
    else:
        folder = Path(tempfile.gettempdir()) / "qbheat_det_user"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        if _is_private(folder):
            return folder
    except OSError:  # a file has this name
        pass
    return Path(tempfile.mkdtemp(prefix="qbheat_det_"))


def _is_private(folder: Path) -> bool:
    """Returns whether a path is a folder that this user owns and no other user can write to."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        return False
    if hasattr(os, "getuid") and status.st_uid != os.getuid():
        return False
    others_can_write = bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
    return not (others_can_write and os.name == "posix")
