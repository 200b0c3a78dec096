# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Hooks of the trainer: evaluation, checkpoints, moving average, skipped images, memory."""

import logging
import math
import re
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import torch
from detectron2.config import CfgNode
from detectron2.engine import HookBase
from detectron2.evaluation.testing import flatten_results_dict
from detectron2.utils import comm
from detectron2.utils.events import EventStorage
from torch import Tensor, nn

from qbheat_det.core.environment import keep_freed_memory, return_freed_memory
from qbheat_det.core.files import write_atomically
from qbheat_det.core.termination import Interrupted
from qbheat_det.data import DataError, join_messages

from .run_record import BEST_RESULTS_FOLDER

logger = logging.getLogger(__name__)
SKIPPED_FILE = "skipped_images.txt"
_PERIODIC = re.compile(r"model_(\d{7,})\.pth")  # the number is the iteration


class TrainingRun(Protocol):
    """The part of ``qbheat_det.engine.Trainer`` that hooks use.

    ``Trainer`` documents the attributes and methods.
    """

    cfg: CfgNode
    iter: int  # from 0
    start_iter: int  # above 0 in a resumed run
    max_iter: int  # number of iterations of the whole run
    storage: EventStorage
    data_loader: Any  # the training batches of this process
    bare_model: nn.Module

    @property
    def stops(self) -> bool: ...
    @property
    def evaluated_model(self) -> nn.Module: ...
    def evaluate(self) -> dict[str, Any]: ...
    def save(self, name: str) -> None: ...
    def export(self, name: str) -> None: ...
    def ask_to_stop(self) -> None: ...
    def move_end(self, max_iter: int) -> None: ...


def is_due(run: TrainingRun, period: int) -> bool:
    """Whether a periodic action is due after this step; period 0 means after the last step only."""
    num_done = run.iter + 1
    is_last = num_done >= run.max_iter
    return is_last or (period > 0 and num_done % period == 0)


def is_saved(run: TrainingRun, period: int) -> bool:
    """Whether a checkpoint is written after this step, as it is due or the run stops."""
    return is_due(run, period) or run.stops


def save_checkpoint(run: TrainingRun) -> None:
    """Saves a checkpoint. After the last step, also exports the evaluated weights."""
    if run.iter + 1 < run.max_iter:
        run.save(f"model_{run.iter:07d}")
        return
    run.export("model_final")
    run.save("model_final")


class EvalHook(HookBase):
    """Evaluates periodically and after the last step, and exports the best weights so far.

    Ends the run early if no evaluation was better than the best one for a while.

    This hook must come before ``PeriodicCheckpointer``, so that a checkpoint contains all results
    up to its iteration. If an evaluation fails, the hook saves a checkpoint and raises the error.

    Attributes:
        best: dict with "value" and "iteration" of the best evaluation so far; empty at first.
        is_owed: whether an evaluation is due that was skipped or has failed. A resumed run begins
            with it.
        is_evaluating: whether an evaluation is in progress.
        value: value of ``best_metric`` in the last evaluation (main process only); None if it is
            missing or not finite.
        sign: 1 if a higher value is better, -1 if a lower one is.
        seconds: duration of the evaluation after the current step; 0.0 if there was none.
    """

    trainer: TrainingRun

    def __init__(self, *, period: int, best_metric: str, patience: float = 0.0) -> None:
        """
        Args:
            period: iterations between evaluations; 0 evaluates only after the last step.
            best_metric: "task/metric" that selects the best weights. Higher is better, unless the
                metric's name begins with "loss".
            patience: share of the run's iterations without a better evaluation after which the run
                ends; 0 never ends it early.
        """
        self._period = period
        self._best_metric = best_metric
        self._patience = patience
        self.best: dict[str, float] = {}
        self.is_owed = False
        self.is_evaluating = False
        self.value: float | None = None
        self.sign = find_sign(best_metric)
        self.seconds = 0.0

    def state_dict(self) -> dict[str, Any]:
        """Returns the best evaluation so far, the name of its metric, and ``self.is_owed``."""
        return {"metric": self._best_metric, "is_owed": self.is_owed, **self.best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the result of ``state_dict``.

        The best evaluation is forgotten if the state has it for another metric.
        """
        self.is_owed = state_dict["is_owed"]
        self.best = {}
        if state_dict["metric"] == self._best_metric:
            keys = ("value", "iteration")
            self.best = {key: state_dict[key] for key in keys if key in state_dict}

    def before_train(self) -> None:
        """Runs the evaluation that was skipped or failed before the run was resumed."""
        if not self.is_owed:
            return
        self.trainer.iter -= 1  # results belong to the last completed step
        try:
            self._run()
            save_checkpoint(self.trainer)
        finally:
            self.trainer.iter += 1

    def after_step(self) -> None:
        """Evaluates if an evaluation is due and there are test sets."""
        self.seconds = 0.0
        has_test_sets = bool(self.trainer.cfg.DATASETS.TEST)
        if not has_test_sets or not self.is_due():
            return
        self.is_owed = True
        if self.trainer.stops:
            logger.warning("Skipping the evaluation that is due: --resume begins with it")
            return
        average_batch_statistics(self.trainer)
        try:
            self._run()
        except (Exception, Interrupted):
            save_checkpoint(self.trainer)
            raise

    def is_due(self) -> bool:
        """Whether an evaluation is due after this step."""
        return is_due(self.trainer, self._period)

    def _run(self) -> None:
        """Evaluates, and measures the time."""
        start = time.perf_counter()
        self.is_evaluating = True
        try:
            self._evaluate()
        finally:
            self.is_evaluating = False
        self.is_owed = False
        self.seconds = time.perf_counter() - start
        if comm.all_gather(self.is_out_of_patience())[0]:
            self._stop_early()

    def is_out_of_patience(self) -> bool:
        """Whether no evaluation was better than the best one for too long (main process only)."""
        if not self._patience or not self.best:
            return False
        num_without = self.trainer.iter + 1 - self.count_to_best()
        return num_without >= self._patience * self.trainer.max_iter

    def count_to_best(self) -> int:
        """Returns the number of iterations until the best evaluation (main process only)."""
        return round(self.best["iteration"]) + 1

    def _stop_early(self) -> None:
        """Ends the run after this step, unless it ends anyway; all processes call it."""
        num_done = self.trainer.iter + 1
        num_planned = self.trainer.max_iter
        if num_done >= num_planned:
            return
        self.trainer.move_end(num_done)
        if comm.is_main_process():
            logger.info(
                f"Stopping early, after {num_done:,} of {num_planned:,} iterations: "
                f"{self._best_metric} was best ({self.best['value']:.4g}) after "
                f"{self.count_to_best():,} (TEST.PATIENCE {self._patience:g}; 0 never stops early)"
            )

    def _evaluate(self) -> None:
        """Evaluates and logs the results. Exports the weights if they are the best so far."""
        results = self.trainer.evaluate()
        if not comm.is_main_process():
            return
        metrics = flatten_results_dict(results)  # by name, such as "bbox/AP"
        finite = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
        self.trainer.storage.put_scalars(smoothing_hint=False, **finite)
        if self._best_metric not in metrics:
            known = ", ".join(metrics)
            logger.warning(f"TEST.BEST_METRIC '{self._best_metric}' is not among {known}")
            return
        value = finite.get(self._best_metric)
        self.value = value
        if value is None:
            return
        if self.best and self.sign * value <= self.sign * self.best["value"]:
            return
        self.best = {"value": value, "iteration": self.trainer.iter}
        self.trainer.export("model_best")
        self._keep_results()
        logger.info(f"Best {self._best_metric} so far: {value:.4g}, in model_best.safetensors")

    def _keep_results(self) -> None:
        """Copies the results of this evaluation, such as detections, for the report."""
        folder = Path(self.trainer.cfg.OUTPUT_DIR)
        kept = folder / BEST_RESULTS_FOLDER
        shutil.rmtree(kept, ignore_errors=True)
        if (folder / "inference").is_dir():
            shutil.copytree(folder / "inference", kept)


def find_sign(metric: str) -> int:
    """Returns 1 if a higher value of a metric is better, -1 if a lower one is, as of a loss."""
    return -1 if metric.rpartition("/")[2].startswith("loss") else 1


class PeriodicCheckpointer(HookBase):
    """Saves periodically and after the last step, and removes all but the newest checkpoints.

    This hook must come after the hooks that log, so that a checkpoint contains their state.

    Attributes:
        seconds: duration of the save after the current step; 0.0 if there was none.
    """

    trainer: TrainingRun

    def __init__(self, *, period: int, kept: int) -> None:
        """Period 0 saves after the last step only; ``kept`` 0 keeps all checkpoints."""
        self._period = period
        self._kept = kept
        self.seconds = 0.0

    def after_step(self) -> None:
        self.seconds = 0.0
        run = self.trainer
        if not is_saved(run, self._period):
            return
        start = time.perf_counter()
        average_batch_statistics(run)
        save_checkpoint(run)
        if self._kept and comm.is_main_process():
            self._remove_old(Path(run.cfg.OUTPUT_DIR))
        self.seconds = time.perf_counter() - start

    def _remove_old(self, folder: Path) -> None:
        """Removes all periodic checkpoints of a folder but the newest ``kept``."""
        checkpoints: dict[int, Path] = {}  # by iteration
        for path in folder.iterdir():
            match = _PERIODIC.fullmatch(path.name)
            if match:
                checkpoints[int(match[1])] = path
        past = sorted(iteration for iteration in checkpoints if iteration <= self.trainer.iter)
        newest = past[-self._kept :]
        # Checkpoints of later iterations are removed too. They are from before the run was resumed
        # from an earlier checkpoint.
        for iteration, path in checkpoints.items():
            if iteration not in newest:
                path.unlink()


class SkippedImages(HookBase):
    """Collects the images that the data streams of all processes skipped, with the reasons.

    Every ``period`` iterations, the log names the images that were skipped in this time. The file
    ``skipped_images.txt`` lists all skipped images. This hook must come before
    ``PeriodicCheckpointer``, which stores its state.

    Attributes:
        errors: the error of each image, by file name; equal on all processes.
    """

    trainer: TrainingRun

    def __init__(self, *, period: int) -> None:
        """Processes exchange errors every ``period`` iterations; with 0, only at the end."""
        self._period = period
        self.errors: dict[str, DataError] = {}

    def state_dict(self) -> dict[str, Any]:
        """Returns the errors as lists of three strings: kind, place and reason."""
        return {"errors": [[error.kind, error.where, error.reason] for error in self._sorted()]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._add(DataError(*words) for words in state_dict["errors"])

    def after_step(self) -> None:
        """Exchanges and logs new skipped images at the end of a period."""
        if not is_saved(self.trainer, self._period):
            return
        known = set(self.errors)
        errors = list(self.trainer.data_loader.skipped.values())
        for errors_of_process in comm.all_gather(errors):
            self._add(errors_of_process)
        new = [error for error in self._sorted() if error.where not in known]
        if new and comm.is_main_process():
            logger.warning(
                f"{len(self.errors):,} of {self.trainer.data_loader.num_files:,} images were "
                f"skipped so far, see {SKIPPED_FILE}; new: {join_messages(new)}"
            )
            text = "".join(f"{error.message}\n" for error in self._sorted())
            path = Path(self.trainer.cfg.OUTPUT_DIR) / SKIPPED_FILE
            write_atomically(path, text.encode())

    def _add(self, errors: Iterable[DataError]) -> None:
        self.errors.update({error.where: error for error in errors})

    def _sorted(self) -> list[DataError]:
        return sorted(self.errors.values(), key=lambda error: error.where)


class KeptMemory(HookBase):
    """Returns freed memory to the system when the process has grown (CPU, Linux).

    ``SOLVER.KEEP_MEMORY`` keeps freed memory for the next step. With images of many sizes, the kept
    memory grows. It is returned if it is more than 2 % above the lowest value so far. Returning it
    takes about half the time of a step, so it is not done after each step.
    """

    trainer: TrainingRun
    _PERIOD = 20  # steps between checks

    def __init__(self) -> None:
        self._max_pages = math.inf  # limit of resident memory; the first check sets it

    def after_step(self) -> None:
        num_steps = self.trainer.iter + 1 - self.trainer.start_iter
        if num_steps % self._PERIOD:
            return
        # The second number is the resident memory in pages.
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        if pages > self._max_pages:
            return_freed_memory()
        self._max_pages = min(self._max_pages, 1.02 * pages)


def keep_memory(cfg: CfgNode) -> KeptMemory | None:
    """Applies ``SOLVER.KEEP_MEMORY``; returns the hook that limits the kept memory, if needed."""
    if cfg.SOLVER.KEEP_MEMORY and cfg.MODEL.DEVICE == "cpu" and keep_freed_memory():
        return KeptMemory()
    return None


def average_batch_statistics(run: TrainingRun) -> None:
    """Makes BatchNorm's running statistics equal on all processes, for saving and evaluation."""
    if comm.get_world_size() == 1:
        return
    # A dict keeps the order, which must be the same on all processes.
    for model in dict.fromkeys((run.bare_model, run.evaluated_model)):
        for name, buffer in model.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                average_over_processes(buffer)


def average_over_processes(tensor: Tensor) -> None:
    """Replaces a tensor by its mean over all processes, in place.

    If the tensor is the same on all processes, it does not change by a single bit. The mean of n
    equal numbers is rounded, so frozen statistics would drift. Therefore the differences from the
    first process are averaged, which are then 0.
    """
    first = tensor.clone()
    torch.distributed.broadcast(first, src=0)
    difference = tensor - first
    torch.distributed.all_reduce(difference)
    tensor.copy_(first + difference / comm.get_world_size())
