# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Checks and settings of the environment: Detectron2, user modules, logs, memory, CPU flags."""

import contextlib
import ctypes
import importlib
import importlib.util
import logging
import os
import platform
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # tools that print --help do without
    import torch

# Not a requirement in setup.py: the package index has no release under the name detectron2.
_HOW_TO_INSTALL = (
    "qbheat_det needs Detectron2, which this Python does not have: run `qbheat setup`, or `python "
    "tools/install_detectron2.py` in a checkout, which install it as pure Python; or build the "
    "official one with `pip install --no-build-isolation "
    "'git+https://github.com/facebookresearch/detectron2.git'`"
)
# Linux's names: AVX-512 and AMX products of bfloat16, and Arm's.
_BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}


def require_detectron2() -> None:
    """Raises an ``ImportError`` with the ways to install Detectron2 where it is not found."""
    spec = importlib.util.find_spec("detectron2")
    # A folder named detectron2, such as a checkout beside the script, is found without an origin.
    if spec is None or spec.origin is None:
        raise ImportError(_HOW_TO_INSTALL, name="detectron2")


def import_own_modules() -> None:
    """Imports the modules that ``$QBHEAT_IMPORT`` names, separated by commas.

    The names come from an environment variable because a config may come from a stranger and must
    not run code.

    Raises:
        ImportError: a module is not found; the message says where to put it.
    """
    for name in filter(None, map(str.strip, os.environ.get("QBHEAT_IMPORT", "").split(","))):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name.split(".")[0] and error.name != name:
                raise  # something that the module itself imports
            raise ImportError(
                f"QBHEAT_IMPORT names the module '{name}', which Python does not find: put the "
                "folder that holds it on PYTHONPATH, or unset QBHEAT_IMPORT",
                name=name,
            ) from error


@contextlib.contextmanager
def quiet(*names: str) -> Iterator[None]:
    """Silences Python warnings, and messages of some loggers below CRITICAL."""
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
    """Makes malloc keep freed memory for later allocations; returns False without glibc.

    By default, glibc returns large blocks to the system, and the kernel fills new blocks with zeros
    page by page. For feature maps of tens of megabytes, this takes as long as the computation.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    trim_threshold, mmap_max = -1, -4  # of malloc.h
    most_kept = 2**31 - 1  # bytes
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(mmap_max, 0) and mallopt(trim_threshold, most_kept))


def return_freed_memory() -> None:
    """Returns unused memory that ``keep_freed_memory`` kept to the system."""
    ctypes.CDLL(None).malloc_trim(0)


def supports_bfloat16(device: "torch.device") -> bool:
    """Returns whether a device multiplies bfloat16 natively instead of emulating it."""
    if device.type == "cuda":
        import torch

        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type == "cpu" and bool(read_cpu_flags() & _BF16_FLAGS)


def read_cpu_flags() -> set[str]:
    """Returns the processor's features by Linux's names; none on other systems."""
    return set(read_cpu_field("flags", "features").split())


def read_cpu_field(*names: str) -> str:
    """Returns the first of these fields in Linux's ``/proc/cpuinfo``; "" on other systems."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    fields = (line.partition(":") for line in lines)
    return next((value.strip() for key, _, value in fields if key.strip().lower() in names), "")
