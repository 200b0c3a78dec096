# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Hooks that log the memory of training steps and how long they wait for data."""

import logging
import os
import time

from detectron2.engine import HookBase
from detectron2.utils import comm

from qbheat_det.core.text import format_bytes

from ..memory import PeakMemory
from ..run_record import add_to_run_record
from .training_run import TrainingRun

logger = logging.getLogger(__name__)
MOST_WAITING = 0.05
"""Share of its time that a step may wait for data before the log suggests a remedy."""
_MIN_STEPS = 10  # before a warning
_MIB = 2**20
_NEARLY_FULL = 0.8


class MemoryMonitor(HookBase):
    """Logs the peak memory of the first step, and ``peak_memory_mib`` of the run periodically.

    On the CPU it is that of the process. AdamW allocates its moments in the first step, so that
    later steps start with more memory in use.
    """

    trainer: TrainingRun

    def __init__(self, *, period: int) -> None:
        self._period = period
        self._memory: PeakMemory | None = None

    def before_step(self) -> None:
        """Starts measuring at the first step, when everything is built and loaded."""
        if self._memory is None:
            self._memory = PeakMemory(next(self.trainer.bare_model.parameters()).device)

    def after_step(self) -> None:
        """Reads the peak if it is due, which takes microseconds."""
        assert self._memory is not None
        is_first = self.trainer.iter == self.trainer.start_iter
        if not is_first and (self.trainer.iter + 1) % self._period:
            return
        before, peak = self._memory.before, self._memory.peak
        self.trainer.storage.put_scalar("peak_memory_mib", peak / _MIB, smoothing_hint=False)
        if is_first and comm.is_main_process():
            logger.info(describe_memory(before, peak, self._memory.total))
            memory = {"before_first_step": before, "peak_of_first_step": peak}
            in_mib = {name: round(size / _MIB, 1) for name, size in memory.items()}
            add_to_run_record(self.trainer.cfg.OUTPUT_DIR, memory_mib=in_mib)


class DataTimeMonitor(HookBase):
    """Logs ``data_share``, the share of their time that steps wait for data, and warns once.

    The share is that of the steps since the last line of the log. The first step, in which workers
    start, is not counted.
    """

    trainer: TrainingRun

    def __init__(self, *, period: int, num_workers: int) -> None:
        self._period = period
        self._num_workers = num_workers
        self._start = 0.0
        self._waited, self._total, self._count = 0.0, 0.0, 0  # seconds, seconds, steps
        self._warned = False

    def before_step(self) -> None:
        self._start = time.perf_counter()

    def after_step(self) -> None:
        """Adds the step, and logs the share if it is due."""
        if self.trainer.iter == self.trainer.start_iter:
            return
        self._total += time.perf_counter() - self._start
        self._waited += self.trainer.storage.latest()["data_time"][0]
        self._count += 1
        if (self.trainer.iter + 1) % self._period:
            return
        share, seconds = self._waited / self._total, self._total / self._count
        self.trainer.storage.put_scalar("data_share", share, smoothing_hint=False)
        if share > MOST_WAITING and not self._warned and self._count >= _MIN_STEPS:
            self._warned = True
            if comm.is_main_process():
                logger.warning(describe_waiting(share, seconds, self._num_workers))
        self._waited, self._total, self._count = 0.0, 0.0, 0


def describe_memory(before: int, peak: int, total: int) -> str:
    """Returns the log line after the first step, from bytes before, at the peak, and in total."""
    line = (
        f"Memory: {format_bytes(peak)} at the peak of the first step, {format_bytes(before)} "
        f"before it, {format_bytes(total)} in total"
    )
    if peak < _NEARLY_FULL * total:
        return line
    return f"{line}: MODEL.ACTIVATION_CHECKPOINTING True needs less"


def describe_waiting(share: float, step_seconds: float, num_workers: int) -> str:
    """Returns a warning for steps of which that share, in [0, 1], is spent waiting for data."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    waiting = f"Steps of {step_seconds:.2g} s wait for data {100 * share:.0f} % of their time"
    if num_workers < (cores or 1):
        return f"{waiting}: raise DATALOADER.NUM_WORKERS from {num_workers} to {cores}"
    return (
        f"{waiting} with {num_workers} workers: raise INPUT.PRETRAIN.MEMORY_GB, or set "
        "MODEL.CACHE_FEATURES.ENABLED"
    )
