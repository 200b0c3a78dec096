# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Ctrl-C and the signals of job schedulers: a run ends after its step, with a checkpoint."""

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
from qbheat_det.engine.run_record import RUN_FILE, find_launch, read_run_record

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class StopSignals(HookBase):
    """Ends a run in order on SIGINT, SIGTERM or SIGUSR1; it is the last hook.

    Processes agree by the exchange of their losses after which step they end; the hook that saves
    knows it by then. An evaluation is broken off at once: its step is saved, and ``--resume``
    begins with it. A second Ctrl-C ends the process as it stands, but under torchrun, which repeats
    the first.
    """

    trainer: Any

    def __init__(self) -> None:
        self._number = 0
        self._before: dict[int, Any] = {}

    def before_train(self) -> None:
        """Takes over the signals, where Python allows it: in the main thread."""
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in _SIGNALS}

    def after_train(self) -> None:
        """Gives the signals back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def after_step(self) -> None:
        """Ends the run if a process was asked to.

        Raises:
            Interrupted: on every process, once the checkpoint is there.
        """
        if self.trainer.stops:
            comm.synchronize()  # torchrun ends the others when the first is gone
            raise self._interrupt()

    def _note(self, number: int, frame: FrameType | None) -> None:
        is_second, self._number = bool(self._number), self._number or number
        if is_second and number == signal.SIGINT and not find_launch():
            raise KeyboardInterrupt
        if self.trainer.find_hook(EvalHook).is_evaluating:
            raise self._interrupt()
        self.trainer._trainer.asked_to_stop = True
        if comm.is_main_process() and not is_second:  # printing might interrupt itself
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
    """Ends a run that was started again elsewhere, before it saves over that one's checkpoints.

    Where torchrun takes a machine for dead that is only slow, others continue without it.
    """

    trainer: TrainingRun

    def before_train(self) -> None:
        """Counts the starts up to this one."""
        self._file = Path(self.trainer.cfg.OUTPUT_DIR) / RUN_FILE
        self._count = len(read_run_record(self._file))

    def after_step(self) -> None:
        """Looks for a later start where a checkpoint is due.

        Raises:
            UserError: there is one.
        """
        if not is_saved(self.trainer, self.trainer.cfg.SOLVER.CHECKPOINT_PERIOD):
            return
        if later := read_run_record(self._file)[self._count :]:
            raise UserError(
                f"'{self._file}' has a later start, of {later[0].get('started')}: it continues, "
                "and this one ends without saving"
            )
