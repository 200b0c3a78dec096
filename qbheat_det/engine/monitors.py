# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Hooks that log the memory of steps, how long they wait for data, and images left out."""

import contextlib
import logging
import multiprocessing
import os
import resource
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from detectron2.engine import HookBase
from detectron2.utils import comm

from qbheat_det.core.files import write_atomically
from qbheat_det.core.text import format_bytes
from qbheat_det.data import DataError, join_messages

from .hooks import TrainingRun, is_due

logger = logging.getLogger(__name__)
SKIPPED_FILE = "skipped_images.txt"
_MOST_WAITING = 0.05  # share of its time that a step may wait for data before a warning
_MIN_STEPS = 10  # before a warning
_NEARLY_FULL = 0.8
_GROUP = Path("/proc/self/cgroup")
_GROUPS_ROOT = Path("/sys/fs/cgroup")


class MemoryMonitor(HookBase):
    """Logs the peak memory after the first step, and periodically as ``peak_memory_mib``.

    On a GPU it is that of tensors, else that of the process without the loader's workers.
    """

    trainer: TrainingRun

    def __init__(self, *, period: int) -> None:
        self._period = period

    def after_step(self) -> None:
        """Reads the peak if it is due, which takes microseconds."""
        run = self.trainer
        is_first = run.iter == run.start_iter
        if not is_first and (run.iter + 1) % self._period:
            return
        device = next(run.bare_model.parameters()).device
        if device.type == "cuda":
            peak = int(torch.cuda.max_memory_allocated(device))
            total = int(torch.cuda.get_device_properties(device).total_memory)
        else:
            peak, total = resident_peak(), total_memory()
        run.storage.put_scalar("peak_memory_mib", peak / 2**20, smoothing_hint=False)
        if is_first and comm.is_main_process():
            hint = ": MODEL.ACTIVATION_CHECKPOINTING True needs less"
            logger.info(
                f"Memory: {format_bytes(peak)} at the peak of the first step, "
                f"{format_bytes(total)} in total{hint if peak > _NEARLY_FULL * total else ''}"
            )


class DataTimeMonitor(HookBase):
    """Logs ``data_share``, the share of their time that steps wait for data, and warns once.

    The share is that of the steps since the last line of the log. Detectron2's ``IterationTimer``,
    which comes before, measures them and leaves out the first ones, in which workers start.
    """

    trainer: TrainingRun

    def __init__(self, *, period: int, num_workers: int) -> None:
        self._period = period
        self._num_workers = num_workers
        self._waited, self._total, self._count = 0.0, 0.0, 0  # seconds, seconds, steps
        self._warned = False

    def after_step(self) -> None:
        """Adds the step, and logs the share if it is due."""
        latest = self.trainer.storage.latest()
        if "time" not in latest:
            return
        self._total += latest["time"][0]
        self._waited += latest["data_time"][0]
        self._count += 1
        if (self.trainer.iter + 1) % self._period:
            return
        share, seconds = self._waited / self._total, self._total / self._count
        self.trainer.storage.put_scalar("data_share", share, smoothing_hint=False)
        if share > _MOST_WAITING and not self._warned and self._count >= _MIN_STEPS:
            self._warned = True
            if comm.is_main_process():
                logger.warning(_describe_waiting(share, seconds, self._num_workers))
        self._waited, self._total, self._count = 0.0, 0.0, 0


class SkippedImages(HookBase):
    """Collects the images that the streams of all processes skipped, and why.

    The log names new ones once a period and all at the end; ``OUTPUT_DIR/skipped_images.txt`` lists
    them. It comes before the hook that saves, so that a resumed run knows of those before.

    Attributes:
        errors: by the image, the same on all processes.
    """

    trainer: TrainingRun

    def __init__(self, *, period: int) -> None:
        """``period`` counts iterations between two exchanges of the processes; 0 is the end."""
        self._period = period
        self.errors: dict[str, DataError] = {}

    def state_dict(self) -> dict[str, Any]:
        """Returns the errors as lists of words."""
        return {"errors": [[error.kind, error.where, error.reason] for error in self._sorted()]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores ``state_dict``."""
        self._add(DataError(*words) for words in state_dict["errors"])

    def after_step(self) -> None:
        """Exchanges and names new images at the end of a period."""
        if not is_due(self.trainer, self._period):
            return
        known = set(self.errors)
        for met in comm.all_gather(list(self.trainer.data_loader.skipped.values())):
            self._add(met)
        new = [error for error in self._sorted() if error.where not in known]
        if new and comm.is_main_process():
            logger.warning(f"Skipped, with another image in its place: {join_messages(new)}")
            text = "".join(f"{error.message}\n" for error in self._sorted())
            path = Path(self.trainer.cfg.OUTPUT_DIR) / SKIPPED_FILE
            write_atomically(path, lambda stream: stream.write(text.encode()))

    def after_train(self) -> None:
        """Counts and names them all, also if the run ends with an error."""
        if self.errors and comm.is_main_process():
            images = self.trainer.data_loader.num_images
            logger.warning(
                f"{len(self.errors):,} of {images:,} images were skipped: "
                f"{join_messages(self._sorted())} (all are in {SKIPPED_FILE})"
            )

    def _add(self, errors: Iterable[DataError]) -> None:
        self.errors.update({error.where: error for error in errors})

    def _sorted(self) -> list[DataError]:
        return sorted(self.errors.values(), key=lambda error: error.where)


def _describe_waiting(share: float, step_seconds: float, num_workers: int) -> str:
    """Returns a warning for steps of which that share, in [0, 1], is spent waiting for data."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    waiting = f"Steps of {step_seconds:.2g} s wait for data {100 * share:.0f} % of their time"
    if num_workers < (cores or 1):
        return f"{waiting}: raise DATALOADER.NUM_WORKERS from {num_workers} to {cores}"
    return (
        f"{waiting} with {num_workers} workers: raise INPUT.PRETRAIN.MEMORY_GB, or set "
        "MODEL.CACHE_FEATURES.ENABLED"
    )


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
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def resident_with_workers() -> int:
    """Returns the peak bytes of this process plus what its workers use now, where Linux says so."""
    total = resident_peak()
    for worker in multiprocessing.active_children():
        with contextlib.suppress(OSError):  # a worker may have ended
            lines = Path(f"/proc/{worker.pid}/smaps_rollup").read_text(encoding="ascii")
            # "Pss" counts memory that workers share with this process by parts, in KiB.
            total += sum(1024 * int(x.split()[1]) for x in lines.splitlines() if x[:4] == "Pss:")
    return total
