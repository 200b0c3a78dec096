# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The moving average of the weights, and periodic checkpoints."""

import re
import time
from pathlib import Path

from detectron2.config import CfgNode
from detectron2.engine import HookBase
from detectron2.utils import comm
from timm.utils import ModelEmaV3
from torch import nn

from qbheat_det.core.errors import UserError

from .evaluation import average_batch_statistics
from .training_run import TrainingRun, is_due, is_last_step

_PERIODIC = re.compile(r"model_(\d{7,})\.pth")


class MovingAverage(HookBase):
    """Updates timm's moving average of all weights and buffers after each step."""

    def __init__(self, average: ModelEmaV3, model: nn.Module) -> None:
        self._average = average
        self._model = model

    def after_step(self) -> None:
        """Adds the new weights, or starts from those of the first step."""
        self._average.update(self._model, step=self.trainer.iter + 1)


def build_average(cfg: CfgNode, model: nn.Module) -> ModelEmaV3 | None:
    """Returns timm's moving average of ``model``, buffers included, if ``SOLVER.EMA`` asks for it.

    Raises:
        UserError: the decay is not in [0, 1).
    """
    keys = cfg.SOLVER.EMA
    if not keys.ENABLED:
        return None
    if not 0 <= keys.DECAY < 1:
        raise UserError(f"SOLVER.EMA.DECAY must be in [0, 1), but is {keys.DECAY}")
    return ModelEmaV3(model, decay=keys.DECAY, use_warmup=keys.WARMUP)


class PeriodicCheckpointer(HookBase):
    """Saves periodically and after the last step, and removes all but the newest checkpoints.

    It is the last of the run's own hooks, so that a resumed run finds all that was logged before.

    Attributes:
        seconds: duration of the save after the current step, 0.0 if there was none.
    """

    trainer: TrainingRun

    def __init__(self, *, period: int, kept: int) -> None:
        """Period 0 saves after the last step only; ``kept`` 0 removes no checkpoint."""
        self._period = period
        self._kept = kept
        self.seconds = 0.0

    def after_step(self) -> None:
        self.seconds = 0.0
        if not is_due(self.trainer, self._period):
            return
        start = time.perf_counter()
        average_batch_statistics(self.trainer)
        if is_last_step(self.trainer):
            self.trainer.export("model_final")
            self.trainer.save("model_final")
        else:
            self.trainer.save(f"model_{self.trainer.iter:07d}")
        self._remove_old()
        self.seconds = time.perf_counter() - start

    def _remove_old(self) -> None:
        if not (self._kept and comm.is_main_process()):
            return
        folder, now = Path(self.trainer.cfg.OUTPUT_DIR), self.trainer.iter
        periodic = {
            int(match[1]): path
            for path in folder.iterdir()
            if (match := _PERIODIC.fullmatch(path.name))
        }
        past = sorted(iteration for iteration in periodic if iteration <= now)
        # Later ones were written before the run was resumed from an earlier checkpoint.
        for iteration in {*past[: -self._kept], *(periodic.keys() - set(past))}:
            periodic[iteration].unlink()
