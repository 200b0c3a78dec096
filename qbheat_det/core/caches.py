# Copyright (c) qbheat_det contributors. Apache-2.0.
"""A temporary folder for caches if the home folder cannot be written, or does not exist.

Otherwise, this package and several libraries would fail or warn, each in its own way.
"""

import logging
import os
import stat
import tempfile
from collections.abc import Mapping, MutableMapping
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
    own = _find_own(environ)
    if not _is_writable(own):
        try:
            folder = _make_temporary()
        except OSError:  # there is no temporary folder: whatever needs a cache fails
            return
        if not environ.get("QBHEAT_CACHE"):
            environ["QBHEAT_CACHE"] = str(folder)
            logger.warning(
                f"The cache folder '{own}' cannot be written, so '{folder}' is used: set "
                "QBHEAT_CACHE to choose another one"
            )
        own = folder
    for variable, name in _LIBRARIES.items():
        if variable not in environ and not _is_writable(Path(os.path.expanduser(name))):
            environ[variable] = str(own / variable.lower())


def _find_own(environ: Mapping[str, str]) -> Path:
    """Returns the path that ``get_cache_dir`` returns, or a path from ~ without a home folder."""
    base = environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.path.expanduser(environ.get("QBHEAT_CACHE") or f"{base}/qbheat_det"))


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


def _make_temporary() -> Path:
    """Returns the user's own folder for temporary files, which later processes use again.

    If another user can write to it or owns it, returns a new folder, because caches contain
    programs that are executed.
    """
    user = os.getuid() if hasattr(os, "getuid") else "user"
    folder = Path(tempfile.gettempdir()) / f"qbheat_det_{user}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
        is_own = not hasattr(os, "getuid") or status.st_uid == os.getuid()
        others = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if stat.S_ISDIR(status.st_mode) and is_own and not (others and os.name == "posix"):
            return folder
    except OSError:  # a file has this name
        pass
    return Path(tempfile.mkdtemp(prefix="qbheat_det_"))
