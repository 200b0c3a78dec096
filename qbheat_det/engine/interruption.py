# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Saves a checkpoint and ends the run after the current step, on Ctrl-C or a scheduler's signal."""

import os
import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from detectron2.engine import HookBase
from detectron2.utils import comm

from qbheat_det.core.errors import Interrupted, UserError
from qbheat_det.engine.hooks import EvalHook, TrainingRun, is_saved
from qbheat_det.engine.resume import RUN_FILE, find_launch, read_run_record

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class StopSignals(HookBase):
    """Ends a run on SIGINT, SIGTERM or SIGUSR1; must be the last hook.

    Processes share signals in the all-reduce of the losses. So all of them know about a signal
    before the checkpoint hook runs, and stop after the same step. A signal interrupts an evaluation
    immediately: the step is saved, and ``--resume`` starts with the evaluation. A second Ctrl-C
    ends the process immediately, but not under torchrun, which itself sends the first signal again.
    """

    trainer: Any

    def __init__(self) -> None:
        self._number = 0
        self._before: dict[int, Any] = {}

    def before_train(self) -> None:
        """Installs the signal handlers; Python allows this only in the main thread."""
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in _SIGNALS}

    def after_train(self) -> None:
        """Restores the signal handlers."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def after_step(self) -> None:
        """Ends the run if any process received a signal.

        Raises:
            Interrupted: a process received a signal; raised on all, after the checkpoint is saved.
        """
        if self.trainer.stops:
            comm.synchronize()  # torchrun ends the others after the first exit
            raise self._interrupt()

    def _note(self, number: int, frame: FrameType | None) -> None:
        is_second, self._number = bool(self._number), self._number or number
        if is_second and number == signal.SIGINT and not find_launch():
            raise KeyboardInterrupt
        if self.trainer.find_hook(EvalHook).is_evaluating:
            raise self._interrupt()
        self.trainer._trainer.asked_to_stop = True
        if comm.is_main_process() and not is_second:  # print is not safe in a signal handler
            name = signal.Signals(number).name.encode()
            os.write(2, b"\n%s: stopping after this step, with a checkpoint\n" % name)

    def _interrupt(self) -> Interrupted:
        run, number = self.trainer, self._number or signal.SIGTERM
        done = min(run.iter + 1, run.max_iter)
        return Interrupted(
            number,
            f"stopped by {signal.Signals(number).name} after {done} of {run.max_iter} iterations: "
            f"--resume continues from the checkpoint in '{run.cfg.OUTPUT_DIR}'",
        )


class YieldToNewerStart(HookBase):
    """Ends this process if the run was restarted elsewhere, before it overwrites new checkpoints.

    If torchrun considers a slow machine dead, it restarts the run without that machine.
    """

    trainer: TrainingRun

    def before_train(self) -> None:
        """Counts the starts in ``run.json``, including this one."""
        self._file = Path(self.trainer.cfg.OUTPUT_DIR) / RUN_FILE
        self._count = len(read_run_record(self._file))

    def after_step(self) -> None:
        """Checks for a later start whenever a checkpoint is due.

        Raises:
            UserError: the run has a later start.
        """
        if not is_saved(self.trainer, self.trainer.cfg.SOLVER.CHECKPOINT_PERIOD):
            return
        if later := read_run_record(self._file)[self._count :]:
            raise UserError(
                f"'{self._file}' has a later start, at {later[0].get('started')}: this process "
                "ends without saving"
            )
