# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What a hook may use of the trainer that runs it."""

from typing import Any, Protocol

from detectron2.config import CfgNode
from detectron2.utils.events import EventStorage
from torch import nn


class TrainingRun(Protocol):
    """A run in progress; ``qbheat_det.engine.Trainer`` is one.

    Attributes:
        cfg: resolved config.
        iter: current iteration, from 0.
        start_iter: first iteration of this process; above 0 where a run was resumed.
        max_iter: number of iterations of the whole run.
        storage: Detectron2's storage, which the writers read.
        data_loader: gives the training batches of this process.
        bare_model: the model without the wrapper for distributed training.
    """

    cfg: CfgNode
    iter: int
    start_iter: int
    max_iter: int
    storage: EventStorage
    data_loader: Any
    bare_model: nn.Module

    @property
    def evaluated_model(self) -> nn.Module:
        """The moving average of the model where there is one, else ``bare_model``."""

    def evaluate(self) -> dict[str, Any]:
        """Returns results on the test sets by task; empty but on the main process."""

    def save(self, name: str) -> None:
        """Writes the checkpoint ``OUTPUT_DIR/<name>.pth``, from which the run can be resumed."""

    def export(self, name: str) -> None:
        """Writes the evaluated weights alone to ``OUTPUT_DIR/<name>.safetensors``."""


def is_last_step(run: TrainingRun) -> bool:
    """Whether the current step is the run's last."""
    return bool(run.iter + 1 >= run.max_iter)


def is_due(run: TrainingRun, period: int) -> bool:
    """Whether a periodic action follows this step: period 0 acts after the last step only."""
    return is_last_step(run) or (period > 0 and (run.iter + 1) % period == 0)
