# Copyright (c) qbheat_det contributors. Apache-2.0.
"""A temporary folder for caches if the home folder cannot be written, or does not exist.

Otherwise, this package and several libraries would fail or warn, each in its own way.
"""

import logging
import os
import stat
import tempfile
from collections.abc import MutableMapping
from pathlib import Path

logger = logging.getLogger(__name__)
# Variables that name cache folders of libraries, and the folders that they use by default.
_LIBRARIES = {
    "FVCORE_CACHE": "~/.torch/iopath_cache",
    "MPLCONFIGDIR": "~/.config/matplotlib",
    "TRITON_CACHE_DIR": "~/.triton",
    "XDG_CACHE_HOME": "~/.cache",
}


def use_writable_caches(environ: MutableMapping[str, str] = os.environ) -> None:
    """Sets the environment variables of caches whose default folders cannot be written.

    ``QBHEAT_CACHE`` becomes a temporary folder of the user, and one line is logged. The caches of
    libraries become subfolders of it. Variables that are already set do not change. Child processes
    inherit the variables.

    Args:
        environ: the variables to set. ~ depends on ``os.environ``.
    """
    # The folder of ``get_cache_dir``. Without a home folder, the path keeps its "~".
    base = environ.get("XDG_CACHE_HOME") or "~/.cache"
    cache = Path(os.path.expanduser(environ.get("QBHEAT_CACHE") or f"{base}/qbheat_det"))
    if not _is_writable(cache):
        try:
            temporary = _make_temporary_folder()
        except OSError:  # there is no temporary folder: whatever needs a cache fails
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
    """Whether files can be created in a folder, or in the existing folder that will contain it."""
    if folder.parts[:1] == ("~",):  # the user has no home folder
        return False
    try:
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        with tempfile.TemporaryFile(dir=existing):
            return True
    except (OSError, StopIteration):
        return False


def _make_temporary_folder() -> Path:
    """Returns a temporary folder of the user, which later processes use again.

    If another user can write to it or owns it, returns a new folder, because caches contain
    programs that are executed.
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
    """Whether a path is a folder that this user owns, and to which no other user can write."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        return False
    if hasattr(os, "getuid") and status.st_uid != os.getuid():
        return False
    others_can_write = bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
    return not (others_can_write and os.name == "posix")
