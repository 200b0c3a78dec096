# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Versions of the libraries and of the code, for the records of runs."""

import functools
import importlib
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

VERSION = "0.2.0"
"""The version of this package; ``setup.py`` has it too."""
_PACKAGES = ("torch", "torchvision", "detectron2", "qbheat_det", "timm", "numpy")
_CODE = ("qbheat_det", "configs", "tools")
_CHECKOUT = Path(__file__).resolve().parents[2]


def list_versions() -> dict[str, str]:
    """Returns the versions of Python and of the libraries that decide what a run computes."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:  # on the path without being installed
            module = importlib.import_module(package)
            versions[package] = str(getattr(module, "__version__", "unknown"))
    return versions


def find_commit() -> str:
    """Returns the commit of the code, with ``-dirty`` where it was changed; "" if unknown."""
    commit, dirty = find_code_version()
    return f"{commit}{'-dirty' if dirty else ''}" if commit else ""


@functools.cache
def find_code_version(checkout: Path = _CHECKOUT) -> tuple[str | None, bool | None]:
    """Returns the commit of a checkout, and whether its code was changed.

    Both are None for an installed wheel, and without git.
    """
    # Inside a git hook, GIT_DIR and its kin name another repository.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}

    def git(*arguments: str) -> str:
        command = ["git", "--no-optional-locks", *arguments]
        run = subprocess.run(
            command, check=True, cwd=checkout, env=environment, capture_output=True, text=True,
            timeout=20,
        )  # fmt: skip
        return run.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "qbheat_det/__init__.py")
        return git("rev-parse", "HEAD"), bool(git("status", "--porcelain", "--", *_CODE))
    except (OSError, subprocess.SubprocessError):
        return None, None
