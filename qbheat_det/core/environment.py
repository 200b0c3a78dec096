# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Functions for the environment: Detectron2, user modules, versions, memory and CPU features."""

import contextlib
import ctypes
import functools
import importlib
import importlib.metadata
import importlib.util
import logging
import os
import platform
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # importing torch would delay --help by seconds
    import torch

# Not a requirement in setup.py: the package index has no release under the name detectron2.
_HOW_TO_INSTALL = (
    "qbheat_det needs Detectron2, which this Python does not have: run `qbheat setup`, or `python "
    "tools/install_detectron2.py` in a checkout, which install it as pure Python; or build the "
    "official one with `pip install --no-build-isolation "
    "'git+https://github.com/facebookresearch/detectron2.git'`"
)
# Linux's names of CPU features for bfloat16 products: AVX-512, AMX and Arm.
_BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}
VERSION = "0.2.0"
"""The version of this package; must equal the version in ``setup.py``."""
_PACKAGES = ("torch", "torchvision", "detectron2", "qbheat_det", "timm", "numpy")
_CODE = ("qbheat_det", "configs", "tools")
_CHECKOUT = Path(__file__).resolve().parents[2]
_MAX_KEPT_BYTES = 2**31 - 1  # the largest value that mallopt accepts
# Constants of glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4


def count_cores() -> int:
    """Returns the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # on Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def require_detectron2() -> None:
    """If Detectron2 is missing, raises an ``ImportError`` that explains how to install it."""
    spec = importlib.util.find_spec("detectron2")
    # A mere folder named detectron2, such as a checkout next to the script, has no origin.
    if spec is None or spec.origin is None:
        raise ImportError(_HOW_TO_INSTALL, name="detectron2")


def import_own_modules() -> None:
    """Imports the user's modules that the environment variable ``QBHEAT_IMPORT`` names.

    Names are separated by commas. The config cannot name them, because a config may come from an
    untrusted source and must not run code.

    Raises:
        ImportError: a module was not found. The message explains where to put it.
    """
    for entry in os.environ.get("QBHEAT_IMPORT", "").split(","):
        name = entry.strip()
        if not name:
            continue
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            is_user_module = error.name in (name, name.split(".")[0])
            if not is_user_module:  # an import inside the user's module failed
                raise
            raise ImportError(
                f"QBHEAT_IMPORT names the module '{name}', which Python does not find: put the "
                "folder that contains it on PYTHONPATH, or unset QBHEAT_IMPORT",
                name=name,
            ) from error


def list_versions() -> dict[str, str]:
    """Returns the versions of Python and of the libraries that affect the results of a run."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:  # importable, but not installed
            module = importlib.import_module(package)
            versions[package] = str(getattr(module, "__version__", "unknown"))
    return versions


@functools.cache
def find_commit() -> str:
    """Returns the commit of this package's code, and ``-dirty`` if there are uncommitted changes.

    Returns "" for an installed wheel, or if git is not available.
    """
    # In a git hook, GIT_DIR and similar variables would select a different repository.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}

    def git(*arguments: str) -> str:
        completed = subprocess.run(
            ["git", "--no-optional-locks", *arguments],
            check=True,
            cwd=_CHECKOUT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=20,
        )
        return completed.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "qbheat_det/__init__.py")
        is_dirty = bool(git("status", "--porcelain", "--", *_CODE))
        commit = git("rev-parse", "HEAD")
    except (OSError, subprocess.SubprocessError):
        return ""
    if is_dirty:
        return f"{commit}-dirty"
    return commit


@contextlib.contextmanager
def quiet(*names: str) -> Iterator[None]:
    """Context that hides all Python warnings, and all log messages except critical ones.

    ``names`` are the names of the loggers whose messages are hidden.
    """
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for logger in loggers:
                logger.setLevel(logging.CRITICAL)
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def keep_freed_memory() -> bool:
    """Makes malloc keep freed memory for later allocations. Returns whether this is possible.

    By default, glibc returns large blocks to the system when they are freed. The kernel then has to
    fill each new block with zeros. For feature maps of tens of megabytes, this takes as long as the
    computation. Other C libraries do not have the setting.
    """
    if not _has_glibc():
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_M_MMAP_MAX, 0) and mallopt(_M_TRIM_THRESHOLD, _MAX_KEPT_BYTES))


def return_freed_memory() -> None:
    """Returns freed memory that malloc has kept to the system, if the C library is glibc.

    glibc keeps up to 64 MB of freed memory for each thread, also without ``keep_freed_memory``.
    """
    if _has_glibc():
        ctypes.CDLL(None).malloc_trim(0)


@functools.cache
def _has_glibc() -> bool:
    return platform.libc_ver()[0] == "glibc"


def supports_bfloat16(device: "torch.device") -> bool:
    """Returns whether a device multiplies bfloat16 natively instead of emulating it."""
    if device.type == "cuda":
        import torch

        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type == "cpu" and bool(read_cpu_flags() & _BF16_FLAGS)


def read_cpu_flags() -> set[str]:
    """Returns Linux's names of the CPU's features. Returns an empty set on other systems."""
    return set(read_cpu_field("flags", "features").split())


def read_cpu_field(*names: str) -> str:
    """Returns the value of the first field in ``/proc/cpuinfo`` with one of ``names``, or ""."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip().lower() in names:
            return value.strip()
    return ""
