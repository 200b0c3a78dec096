# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Evaluation during training, and BatchNorm statistics that all processes share."""

import logging
import math
import time
from typing import Any

import torch
from detectron2.engine import HookBase
from detectron2.evaluation.testing import flatten_results_dict
from detectron2.utils import comm
from torch import Tensor

from .training_run import TrainingRun, is_due

logger = logging.getLogger(__name__)


class EvalHook(HookBase):
    """Evaluates periodically and after the last step, and exports the best weights so far.

    It comes before ``PeriodicCheckpointer``, so that a checkpoint contains all results up to its
    iteration. If evaluation fails, a checkpoint is saved before the error is raised.

    Attributes:
        best: ``value`` and ``iteration`` of the best evaluation so far; empty before.
        seconds: duration of the evaluation after the current step, 0.0 if there was none.
    """

    trainer: TrainingRun

    def __init__(self, *, period: int, best_metric: str) -> None:
        """
        Args:
            period: 0 evaluates after the last step only.
            best_metric: "task/metric". Higher is better, unless its name begins with "loss".
        """
        self._period = period
        self._best_metric = best_metric
        self.best: dict[str, float] = {}
        self.seconds = 0.0

    def state_dict(self) -> dict[str, Any]:
        """Returns the best evaluation so far, and its metric."""
        return {"metric": self._best_metric, **self.best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores ``state_dict``; a best value of another metric is forgotten."""
        metric, best = state_dict["metric"], {**state_dict}
        del best["metric"]
        self.best = best if metric == self._best_metric else {}

    def after_step(self) -> None:
        """Evaluates if it is due and there are test sets."""
        self.seconds = 0.0
        if not (self.trainer.cfg.DATASETS.TEST and is_due(self.trainer, self._period)):
            return
        start = time.perf_counter()
        average_batch_statistics(self.trainer)
        try:
            self._evaluate()
        except Exception:
            self.trainer.save(f"model_{self.trainer.iter:07d}")
            raise
        self.seconds = time.perf_counter() - start

    def _evaluate(self) -> None:
        results = self.trainer.evaluate()
        if not comm.is_main_process():
            return
        metrics = flatten_results_dict(results)
        finite = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
        self.trainer.storage.put_scalars(smoothing_hint=False, **finite)
        if self._best_metric not in metrics:
            known = ", ".join(metrics)
            logger.warning(f"TEST.BEST_METRIC '{self._best_metric}' is not among {known}")
            return
        value = finite.get(self._best_metric)
        sign = -1 if self._best_metric.rpartition("/")[2].startswith("loss") else 1
        if value is None or (self.best and sign * value <= sign * self.best["value"]):
            return
        self.best = {"value": value, "iteration": self.trainer.iter}
        self.trainer.export("model_best")
        logger.info(f"Best {self._best_metric} so far: {value:.4g}, in model_best.safetensors")


def average_batch_statistics(run: TrainingRun) -> None:
    """Makes BatchNorm's running statistics equal on all processes, for saving and evaluation."""
    if comm.get_world_size() == 1:
        return
    # A dict keeps the order, which must be the same on all processes.
    for model in dict.fromkeys((run.bare_model, run.evaluated_model)):
        for name, buffer in model.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                average_over_processes(buffer)


def average_over_processes(own: Tensor) -> None:
    """Averages a tensor over all processes, in place; equal tensors keep their bits."""
    # The sum of n equal numbers divided by n need not be that number; frozen ones would drift.
    first = own.clone()
    torch.distributed.broadcast(first, src=0)
    difference = own - first
    torch.distributed.all_reduce(difference)
    own.copy_(first + difference / comm.get_world_size())
