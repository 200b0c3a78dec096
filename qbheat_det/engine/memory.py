# Copyright (c) qbheat_det contributors. Apache-2.0.
"""How much memory a process takes, on the CPU and on its GPU."""

import contextlib
import multiprocessing
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_GROUPS = Path("/proc/self/cgroup")
_GROUP_FOLDERS = Path("/sys/fs/cgroup")


class PeakMemory:
    """The most memory taken since this was made.

    Attributes:
        before: bytes taken by then; on a GPU by tensors, else by the whole process.
        total: bytes that there are, see ``total_memory``.
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
        self.total = total_memory()

    @property
    def peak(self) -> int:
        """Bytes at the highest; of this process alone, without the workers that load images."""
        if self._on_gpu:
            return int(torch.cuda.max_memory_allocated(self._device))
        return resident_peak()


def total_memory() -> int:
    """Returns the bytes that this process may take: of the machine, or less in a container."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *_group_limits()])


def _group_limits() -> Iterator[int]:
    """Yields the bytes that Linux's control groups allow this process, of both versions."""
    with contextlib.suppress(OSError):
        for line in _GROUPS.read_text(encoding="utf-8").splitlines():
            _, controllers, name = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            root = _GROUP_FOLDERS / "memory" if controllers else _GROUP_FOLDERS
            file = "memory.limit_in_bytes" if controllers else "memory.max"
            # A container may see its own group at the root, under the name that it has outside.
            group = Path(name.lstrip("/"))
            for folder in (group, *group.parents):
                with contextlib.suppress(OSError, ValueError):  # "max" is no number
                    yield int((root / folder / file).read_text(encoding="ascii"))


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
