# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Memory that is freed after an image or a training step is kept for the next one.

glibc gives large blocks back to the system and asks for new ones, which the kernel fills with
zeros page by page: for maps of tens of megabytes that takes as long as the arithmetic on them.
"""

import ctypes
import platform

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of malloc.h
_KEPT = 2**31 - 1  # bytes of free memory above which some goes back


def keep_freed_memory() -> bool:
    """Has this process keep freed memory; returns False where malloc is not glibc's."""
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_M_MMAP_MAX, 0) and mallopt(_M_TRIM_THRESHOLD, _KEPT))
