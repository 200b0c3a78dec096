# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What happens between steps: the moving average, evaluation, saving."""

import logging
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from detectron2.engine import HookBase
from detectron2.engine.hooks import PeriodicWriter
from detectron2.evaluation.testing import flatten_results_dict
from detectron2.utils import comm
from timm.utils import ModelEmaV3
from torch import Tensor, nn

from qbheat_det.core.errors import UserError

if TYPE_CHECKING:
    from .trainer import Trainer

logger = logging.getLogger(__name__)
_PERIODIC = re.compile(r"model_(\d{7,})\.pth")


class MovingAverage(HookBase):
    """Keeps a moving average of all weights and buffers, by timm."""

    def __init__(self, average: ModelEmaV3, model: nn.Module) -> None:
        """
        Args:
            average: what is updated after each step.
            model: what is averaged, bare of any wrapper.
        """
        self._average = average
        self._model = model

    def after_step(self) -> None:
        """Takes the new weights in; the average starts from those of the first step."""
        self._average.update(self._model, step=self.trainer.iter + 1)


class Evaluate(HookBase):
    """Evaluates in its period and at the end, and exports the best weights so far.

    It stands before the hook that saves, so that a checkpoint knows all results up to its
    iteration, and a resumed run leaves none out. Should evaluation fail, a checkpoint is saved all
    the same.
    """

    trainer: "Trainer"

    def __init__(self, *, period: int, best_metric: str) -> None:
        """
        Args:
            period: iterations; 0 evaluates at the end only.
            best_metric: "task/metric" that decides which weights are the best; higher is
                better, but for metrics whose name begins with "loss", where lower is.
        """
        self._period = period
        self._best_metric = best_metric
        self.best: dict[str, float] = {}
        """``value`` and ``iteration`` of the best evaluation so far."""

    def state_dict(self) -> dict[str, Any]:
        """The best evaluation so far, and by which metric."""
        return {"metric": self._best_metric, **self.best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes up what ``state_dict`` gave, if it is by the same metric."""
        same = state_dict.get("metric", self._best_metric) == self._best_metric
        known = {name: value for name, value in state_dict.items() if name != "metric"}
        self.best = known if same else {}

    def after_step(self) -> None:
        """Evaluates where it is time to, if there is something to evaluate on."""
        if not (self.trainer.cfg.DATASETS.TEST and _is_due(self.trainer, self._period)):
            return
        average_batch_statistics(self.trainer)
        try:
            self._evaluate()
        except Exception:
            self.trainer.save(f"model_{self.trainer.iter:07d}")
            raise

    def _evaluate(self) -> None:
        results = self.trainer.evaluate()
        if not comm.is_main_process():
            return
        metrics = flatten_results_dict(results)
        finite = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
        self.trainer.storage.put_scalars(smoothing_hint=False, **finite)
        if self._best_metric not in metrics:
            logger.warning(
                "TEST.BEST_METRIC '%s' is not among the metrics, so no weights are called the "
                "best: %s", self._best_metric, ", ".join(metrics),
            )  # fmt: skip
        elif self._best_metric in finite and self._is_best(finite[self._best_metric]):
            self.best = {"value": finite[self._best_metric], "iteration": self.trainer.iter}
            self.trainer.export("model_best")
            logger.info(
                "Best %s so far: %.4g, in model_best.safetensors",
                self._best_metric,
                self.best["value"],
            )

    def _is_best(self, value: float) -> bool:
        if not self.best:
            return True
        lower_is_better = self._best_metric.rpartition("/")[2].startswith("loss")
        before = self.best["value"]
        return value < before if lower_is_better else value > before


class Write(PeriodicWriter):
    """Detectron2's hook, which after an error closes its writers without writing.

    What they would write is of a step that was not made, and their own errors would hide the one
    that ended the run.
    """

    def after_train(self) -> None:
        """Writes what is left, if the run came to its end, and closes."""
        if self.trainer.iter >= self.trainer.max_iter:
            super().after_train()
            return
        for writer in self._writers:
            writer.close()


class Save(HookBase):
    """Saves in its period and at the end; what is older than the newest few is removed.

    It stands last, so that a resumed run finds all that was logged before.
    """

    trainer: "Trainer"

    def __init__(self, *, period: int, kept: int) -> None:
        """
        Args:
            period: iterations.
            kept: how many periodic checkpoints stay; 0 for all.
        """
        self._period = period
        self._kept = kept

    def after_step(self) -> None:
        """Saves where it is time to."""
        if not _is_due(self.trainer, self._period):
            return
        average_batch_statistics(self.trainer)
        if _is_last(self.trainer):
            self.trainer.export("model_final")
            self.trainer.save("model_final")
        else:
            self.trainer.save(f"model_{self.trainer.iter:07d}")
        self._remove_old()

    def _remove_old(self) -> None:
        if not (self._kept and comm.is_main_process()):
            return
        folder, now = Path(self.trainer.cfg.OUTPUT_DIR), self.trainer.iter
        periodic = {
            int(match[1]): path
            for path in folder.iterdir()
            if (match := _PERIODIC.fullmatch(path.name))
        }
        done = sorted(iteration for iteration in periodic if iteration <= now)
        # Those of later iterations are from before a resumption further back.
        for iteration in {*done[: -self._kept], *(periodic.keys() - set(done))}:
            periodic[iteration].unlink()


def average_batch_statistics(trainer: "Trainer") -> None:
    """Makes BatchNorm's statistics the same on all processes, as saved and as evaluated."""
    if comm.get_world_size() == 1:
        return
    # Not a set: its order may differ between the processes, which must go in step.
    for model in dict.fromkeys((trainer.bare_model, trainer.evaluated_model)):
        for name, own in model.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                average_over_processes(own)


def average_over_processes(own: Tensor) -> None:
    """Averages a tensor over all processes, in place; one that is equal everywhere stays as it is.

    A plain sum of n equal numbers, divided by n, is not always the number: frozen statistics would
    drift with every evaluation.
    """
    first = own.clone()
    torch.distributed.broadcast(first, src=0)
    difference = own - first
    torch.distributed.all_reduce(difference)
    own.copy_(first + difference / comm.get_world_size())


def build_average(model: nn.Module, *, decay: float, warmup: bool) -> ModelEmaV3:
    """Returns timm's moving average of ``model``, buffers too.

    Raises:
        UserError: the decay is not in [0, 1).
    """
    if not 0 <= decay < 1:
        raise UserError(f"SOLVER.EMA.DECAY must lie in [0, 1), but is {decay}")
    return ModelEmaV3(model, decay=decay, use_warmup=warmup)


def _is_due(trainer: "Trainer", period: int) -> bool:
    return _is_last(trainer) or (period > 0 and (trainer.iter + 1) % period == 0)


def _is_last(trainer: "Trainer") -> bool:
    return bool(trainer.iter + 1 >= trainer.max_iter)
