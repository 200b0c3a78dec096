# Copyright (c) qbheat_det contributors. Apache-2.0.
"""How much memory a process takes, on the CPU and on its GPU."""

import contextlib
import multiprocessing
import os
import resource
import sys
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")


class PeakMemory:
    """The most memory taken since this was made.

    Attributes:
        before: bytes taken by then; on a GPU by tensors, else by the whole process.
        total: bytes that there are.
    """

    def __init__(self, device: torch.device) -> None:
        """
        Args:
            device: of the model.
        """
        self._on_gpu = device.type == "cuda"
        self._device = device
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats(device)
            self.before = int(torch.cuda.memory_allocated(device))
            self.total = int(torch.cuda.get_device_properties(device).total_memory)
            return
        with contextlib.suppress(OSError):  # Linux: the peak begins here, not at the imports'
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        self.before = 1024 * read_kib(_STATUS, "VmRSS:") or resident_peak()
        self.total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    @property
    def peak(self) -> int:
        """Bytes at the highest; of this process alone, without the workers that load images."""
        if self._on_gpu:
            return int(torch.cuda.max_memory_allocated(self._device))
        return resident_peak()


def resident_peak() -> int:
    """Returns the bytes of this process at its highest so far."""
    if _STATUS.is_file():
        return 1024 * read_kib(_STATUS, "VmHWM:")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def resident_with_workers() -> int:
    """Returns the bytes of this process at its highest so far, and of its workers now."""
    total = resident_peak()
    for child in multiprocessing.active_children():
        # Proportional, because workers share the dataset with this process.
        total += 1024 * read_kib(Path(f"/proc/{child.pid}/smaps_rollup"), "Pss:")
    return total


def read_kib(path: Path, field: str) -> int:
    """Returns a field of one of Linux's files on a process; 0 where there is none."""
    with contextlib.suppress(OSError):  # a worker may have ended
        for line in path.read_text(encoding="ascii").splitlines():
            if line.startswith(field):
                return int(line.split()[1])
    return 0
