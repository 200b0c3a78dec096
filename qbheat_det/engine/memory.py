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
_GROUP = Path("/proc/self/cgroup")
_GROUPS_ROOT = Path("/sys/fs/cgroup")


class PeakMemory:
    """The peak of memory in use since this object was made.

    Attributes:
        before: bytes in use at that time; on a GPU by tensors, else by the process.
        total: bytes of the GPU, or see ``total_memory``.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self.before = int(torch.cuda.memory_allocated(device))
            self.total = int(torch.cuda.get_device_properties(device).total_memory)
            return
        with contextlib.suppress(OSError):  # on Linux this resets the peak
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        self.before = read_bytes(_STATUS, "VmRSS:") or resident_peak()
        self.total = total_memory()

    @property
    def peak(self) -> int:
        """Bytes, of this process without the workers of its data loader."""
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device))
        return resident_peak()


def total_memory() -> int:
    """Returns the bytes of the machine, or of the container if it is limited to less."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    with contextlib.suppress(OSError):
        # A container may see its own control group at the root, under the name it has outside.
        group = Path(_GROUP.read_text(encoding="utf-8").splitlines()[-1].split(":", 2)[2][1:])
        for folder in (group, *group.parents):
            with contextlib.suppress(OSError, ValueError):  # "max" is no number
                limits.append(int((_GROUPS_ROOT / folder / "memory.max").read_text()))
    return min(limits)


def resident_peak() -> int:
    """Returns the peak bytes of this process."""
    if _STATUS.is_file():
        return read_bytes(_STATUS, "VmHWM:")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def resident_with_workers() -> int:
    """Returns the peak bytes of this process plus what its workers use now."""
    # "Pss" counts memory that workers share with this process by parts.
    workers = multiprocessing.active_children()
    files = [Path(f"/proc/{worker.pid}/smaps_rollup") for worker in workers]
    return resident_peak() + sum(read_bytes(file, "Pss:") for file in files)


def read_bytes(path: Path, field: str) -> int:
    """Returns a field in kB of one of Linux's files on a process, as bytes; 0 if missing."""
    with contextlib.suppress(OSError):  # a worker may have ended
        for line in path.read_text(encoding="ascii").splitlines():
            if line.startswith(field):
                return 1024 * int(line.split()[1])
    return 0
