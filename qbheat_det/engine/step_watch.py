# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What a run says of its own steps: the memory they take, and whether they wait for images."""

import logging
import os
import time
from typing import TYPE_CHECKING

from detectron2.engine import HookBase
from detectron2.utils import comm

from .memory import PeakMemory
from .run_record import add_to_run_record

if TYPE_CHECKING:
    from .trainer import Trainer

logger = logging.getLogger(__name__)
MOST_WAITING = 0.05
"""Share of its time that a step may wait for images before the log says what to do."""
_GIB, _MIB = 2**30, 2**20
_LEAST_STEPS = 10  # before anything is said of waiting
_NEARLY_FULL = 0.8


class Memory(HookBase):
    """Tells the peak after the first step, and puts the peak so far into the log in its period.

    On the CPU it is that of the process. With AdamW the first step ends with the memory that its
    averages take, which all later steps have from their beginning: the figure in the log tells.
    """

    trainer: "Trainer"

    def __init__(self, *, period: int) -> None:
        """
        Args:
            period: iterations.
        """
        self._period = period
        self._memory: PeakMemory | None = None

    def before_step(self) -> None:
        """Starts to look, once everything is built and loaded."""
        if self._memory is None:
            device = next(self.trainer.bare_model.parameters()).device
            self._memory = PeakMemory(device)

    def after_step(self) -> None:
        """Reads the peak where it is time to; costs microseconds."""
        assert self._memory is not None
        first = self.trainer.iter == self.trainer.start_iter
        if first or (self.trainer.iter + 1) % self._period == 0:
            peak = self._memory.peak
            self.trainer.storage.put_scalar("peak_memory_mib", peak / _MIB, smoothing_hint=False)
            if first and comm.is_main_process():
                logger.info(describe_memory(self._memory.before, peak, self._memory.total))
                add_to_run_record(
                    self.trainer.cfg.OUTPUT_DIR,
                    memory_mib={
                        "before_first_step": round(self._memory.before / _MIB, 1),
                        "peak_of_first_step": round(peak / _MIB, 1),
                    },
                )


class Waiting(HookBase):
    """Tells what share of their time steps wait for images, and what can be done about it.

    ``data_share`` in the log is that of the steps since the line before or, where lines are less
    than ten steps apart, of those since an earlier one. The first step, in which workers begin, is
    not counted.
    """

    trainer: "Trainer"

    def __init__(self, *, period: int, num_workers: int) -> None:
        """
        Args:
            period: iterations.
            num_workers: processes that load images.
        """
        self._period = period
        self._num_workers = num_workers
        self._begin = 0.0
        self._waited, self._steps, self._count = 0.0, 0.0, 0  # seconds since the last line
        self._warned = False

    def before_step(self) -> None:
        """Starts the clock."""
        self._begin = time.perf_counter()

    def after_step(self) -> None:
        """Adds the step to its sums, and tells them where it is time to."""
        if self.trainer.iter == self.trainer.start_iter:
            return
        self._steps += time.perf_counter() - self._begin
        self._waited += self.trainer.storage.latest()["data_time"][0]
        self._count += 1
        if (self.trainer.iter + 1) % self._period:
            return
        share = self._waited / self._steps
        self.trainer.storage.put_scalar("data_share", share, smoothing_hint=False)
        if self._count < _LEAST_STEPS and not self._is_last():
            return  # the sums go on
        if share > MOST_WAITING and not self._warned and self._count >= _LEAST_STEPS:
            self._warned = True
            if comm.is_main_process():
                logger.warning(
                    describe_waiting(share, self._steps / self._count, self._num_workers)
                )
        self._waited, self._steps, self._count = 0.0, 0.0, 0

    def _is_last(self) -> bool:
        return bool(self.trainer.iter + 1 >= self.trainer.max_iter)


def describe_memory(before: int, peak: int, total: int) -> str:
    """Returns the line after the first step; with what to do where the memory is nearly full.

    Args:
        before: bytes before the step.
        peak: most bytes within it.
        total: bytes that there are.
    """
    line = (
        f"Memory: {peak / _GIB:.2f} GiB at the peak of the first step, {before / _GIB:.2f} GiB "
        f"before it; there are {total / _GIB:.1f} GiB"
    )
    if peak < _NEARLY_FULL * total:
        return line
    return (
        f"{line}. Larger images may not fit: MODEL.ACTIVATION_CHECKPOINTING True takes less, and "
        "so does a higher SOLVER.ACCUMULATE"
    )


def describe_waiting(share: float, step_seconds: float, num_workers: int) -> str:
    """Returns what to do where steps wait for images.

    Args:
        share: of the steps' time, in [0, 1].
        step_seconds: of one step.
        num_workers: processes that load images.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    waited = (
        f"Steps wait {100 * share:.0f} % of their time for images ({step_seconds * share:.2g} of "
        f"{step_seconds:.2g} s)"
    )
    if num_workers < (cores or 1):
        return (
            f"{waited}: raise DATALOADER.NUM_WORKERS, which is {num_workers} (this process may use "
            f"{cores} cores, which a model on the CPU needs too)"
        )
    return (
        f"{waited}, with as many workers as there are cores ({cores}): store the images smaller, "
        "keep them decoded (INPUT.PRETRAIN.MEMORY_GB), or, on a frozen encoder, cache its features "
        "(MODEL.CACHE_FEATURES.ENABLED)"
    )
