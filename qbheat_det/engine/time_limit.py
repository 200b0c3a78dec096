# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Ends a stage in time, also on a machine that becomes slower or faster during the run.

``--minutes`` plans the stages before they start (``minutes.py``). ``EndInTime`` corrects the plan
during the run.
"""

import logging
import time
from dataclasses import dataclass
from typing import Any

from detectron2.engine import HookBase
from detectron2.utils import comm

from qbheat_det.core.text import format_duration

from .hooks import EvalHook

logger = logging.getLogger(__name__)
# The clock is looked at after this share of the time of a stage, or of its remaining iterations.
_TIME_SHARE = 0.05
_STEPS_SHARE = 0.25
_TOLERANCE = 0.05  # change of the remaining iterations that is too small for another end
_LOGGED_CHANGE = 0.02  # change of all iterations that the log has


@dataclass(frozen=True)
class TimeLimit:
    """The time of a stage.

    Attributes:
        end: when the stage must be done, in seconds of ``time.monotonic``.
        min_iter: number of iterations that are done even if there is no time.
        max_growth: factor by which the number of iterations may grow if there is time.
        evaluation: forecast seconds of an evaluation.
        needed: seconds without which the stage is not worth starting.
    """

    end: float
    min_iter: int = 1
    max_growth: float = 1.0
    evaluation: float = 0.0
    needed: float = 0.0


class EndInTime(HookBase):
    """Moves the end of a run so that the run ends in time, at the speed of the last steps.

    A checkpoint has the time that is left, so the time between an interruption and ``--resume``
    does not count. The main process decides for all. This hook must come before ``EvalHook``, which
    evaluates after the last step.
    """

    trainer: Any

    def __init__(self, limit: TimeLimit, *, max_iter: int, eval_period: int) -> None:
        """
        Args:
            limit: the time of the stage.
            max_iter: planned number of iterations.
            eval_period: iterations between evaluations; 0 evaluates only after the last step.
        """
        self._end = limit.end
        self._evaluation = limit.evaluation
        self._eval_period = eval_period
        self._min_iter = min(limit.min_iter, max_iter)
        self._max_iter = max(max_iter, int(limit.max_growth * max_iter))
        self._pause = _TIME_SHARE * (limit.end - time.monotonic())
        self._last_look: float | None = None
        self._num_steps = 0  # since the last look
        self._not_in_steps = 0.0  # seconds of evaluations since the last look

    def state_dict(self) -> dict[str, float]:
        """Returns the seconds that are left, and those of an evaluation."""
        return {"left": self._end - time.monotonic(), "evaluation": self._evaluation}

    def load_state_dict(self, state_dict: dict[str, float]) -> None:
        self._end = time.monotonic() + state_dict["left"]
        self._evaluation = state_dict["evaluation"]

    def after_step(self) -> None:
        """Moves the end if it is time to look at the clock."""
        now = time.monotonic()
        if self._last_look is None:  # the first step after a start is slow
            self._last_look = now
            return
        self._num_steps += 1
        evaluation_seconds = self.trainer.find_hook(EvalHook).seconds  # after the step before
        if evaluation_seconds:
            self._evaluation = evaluation_seconds
            self._not_in_steps += evaluation_seconds
        in_steps = now - self._last_look - self._not_in_steps
        in_steps, left = comm.all_gather((in_steps, self._end - now))[0]
        num_left = self.trainer.max_iter - self.trainer.iter - 1
        is_soon = in_steps < self._pause and self._num_steps < _STEPS_SHARE * num_left
        if not num_left or (is_soon and left > 0):
            return
        self._move_end(left, in_steps / self._num_steps)
        self._last_look = now
        self._num_steps = 0
        self._not_in_steps = 0.0

    def _move_end(self, left: float, step: float) -> None:
        """Moves the end to what fits into the seconds that are left, at ``step`` seconds each."""
        run = self.trainer
        evaluation = comm.all_gather(self._evaluation)[0]
        if self._eval_period:
            step += evaluation / self._eval_period
        num_done = run.iter + 1
        num_left = int(max(0.0, left - evaluation) / step)
        end = max(num_done + num_left, self._min_iter)
        end = min(end, self._max_iter)
        if abs(end - run.max_iter) <= _TOLERANCE * (run.max_iter - num_done):
            return
        if comm.is_main_process() and abs(end - run.max_iter) > _LOGGED_CHANGE * run.max_iter:
            text = f"--minutes: {end:,} iterations instead of {run.max_iter:,}"
            if num_done + num_left < end:
                more = format_duration(step * (end - num_done) + evaluation)
                text += f", the fewest, although they take {more} and there is no time"
            logger.info(f"{text}; 100 iterations take {format_duration(100 * step)} now")
        run.move_end(end)
