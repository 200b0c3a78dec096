# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Writes metrics to the terminal, ``metrics.json``, TensorBoard and Weights & Biases."""

import copy
import importlib
import json
import logging
import sys
import uuid
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import yaml
from detectron2.config import CfgNode
from detectron2.engine import hooks
from detectron2.utils.events import (
    CommonMetricPrinter,
    EventWriter,
    JSONWriter,
    TensorboardXWriter,
    get_event_storage,
)
from tqdm import tqdm

from qbheat_det.core.errors import UserError
from qbheat_det.core.files import write_atomically

from .console import JSONPrinter, NewScalars, is_interactive, prints_json
from .hooks import TrainingRun


class PeriodicWriter(hooks.PeriodicWriter):
    """Detectron2's hook, which opens its writers when training starts or resumes.

    After an error it closes them without writing: the step is incomplete, and an error of a writer
    would hide the first one.
    """

    trainer: TrainingRun

    def __init__(self, period: int) -> None:
        super().__init__([], period)

    def before_train(self) -> None:
        """Opens the writers and removes lines of ``metrics.json`` that the run will repeat."""
        run, cfg = self.trainer, self.trainer.cfg
        per_epoch = run.data_loader.num_images / cfg.SOLVER.IMS_PER_BATCH
        folder, window = Path(cfg.OUTPUT_DIR), cfg.SOLVER.LOG_PERIOD
        drop_metrics_from(folder / "metrics.json", run.start_iter)
        self._writers: list[EventWriter] = [
            ProgressPrinter(run.max_iter, iterations_per_epoch=per_epoch, window_size=window),
            JSONWriter(str(folder / "metrics.json"), window),
            # purge_step hides the steps that a resumed run repeats
            TensorboardXWriter(str(folder), window, purge_step=run.start_iter),
        ]
        if prints_json():
            self._writers.append(JSONPrinter(window))
        if cfg.SOLVER.WANDB_PROJECT:
            self._writers.append(WandbWriter(cfg, resume=run.start_iter > 0))
        self._bar = tqdm(
            desc="training",
            initial=run.start_iter,
            total=run.max_iter,
            disable=not is_interactive(),
        )

    def after_step(self) -> None:
        """Updates the progress bar, and writes if it is due."""
        self._bar.update()
        super().after_step()
        if self._bar.n % self._period == 0 and not self._bar.disable:
            latest = self.trainer.storage.latest()
            names = [name for name in ("epoch", "total_loss") if name in latest]
            self._bar.set_postfix({name: f"{latest[name][0]:.4g}" for name in names})

    def after_train(self) -> None:
        """Writes the remaining scalars of a complete run, and closes the writers."""
        self._bar.close()
        if self.trainer.iter >= self.trainer.max_iter:
            super().after_train()
            return
        for writer in self._writers:
            writer.close()


def drop_metrics_from(path: Path, iteration: int) -> None:
    """Removes the lines of a ``metrics.json`` at or after an iteration, and incomplete ones."""
    if not path.is_file():
        return
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    kept = [line for line in lines if _is_before(line, iteration)]
    if len(kept) < len(lines):
        write_atomically(path, "".join(f"{line}\n" for line in kept).encode())


def _is_before(line: str, iteration: int) -> bool:
    try:
        return bool(json.loads(line).get("iteration", 0) < iteration)
    except (AttributeError, ValueError, TypeError):
        return False


class ProgressPrinter(CommonMetricPrinter):
    """Writes Detectron2's progress line to ``log.txt``, with the epoch in front."""

    def __init__(self, max_iter: int, *, iterations_per_epoch: float, window_size: int) -> None:
        super().__init__(max_iter, window_size)
        self._iterations_per_epoch = iterations_per_epoch
        epochs = max_iter / iterations_per_epoch
        self.logger: Any = _EpochPrefix(self.logger, {"epochs": epochs})

    def write(self) -> None:
        """Prints the line, and puts ``epoch`` into the storage."""
        storage = get_event_storage()
        epoch = (storage.iter + 1) / self._iterations_per_epoch
        self.logger.extra["epoch"] = epoch
        if any(iteration == storage.iter for _, iteration in storage.latest().values()):
            storage.put_scalar("epoch", epoch, smoothing_hint=False)
        # Detectron2 prints the median of every scalar named "loss"; names with "/" belong to
        # evaluations, which have their own lines.
        steps_only = copy.copy(storage)
        histories = {name: h for name, h in storage.histories().items() if "/" not in name}
        steps_only.histories = lambda: histories
        with steps_only:
            super().write()


class _EpochPrefix(logging.LoggerAdapter):  # type: ignore[type-arg]
    def process(
        self, msg: str, kwargs: MutableMapping[str, Any]
    ) -> tuple[str, MutableMapping[str, Any]]:
        extra: Any = self.extra
        return f"epoch: {extra['epoch']:.2f}/{extra['epochs']:.4g} {msg}", kwargs


class WandbWriter(EventWriter):
    """Sends every scalar to Weights & Biases; ``WANDB_MODE=offline`` keeps them on the disk.

    ``OUTPUT_DIR/wandb_run_id.txt`` stores the id, so that a resumed run continues its curves.
    """

    def __init__(self, cfg: CfgNode, *, resume: bool = False) -> None:
        """Starts a run named after ``OUTPUT_DIR``, or resumes the run of the stored id."""
        wandb, folder = check_wandb(), Path(cfg.OUTPUT_DIR)
        id_file = folder / "wandb_run_id.txt"
        run_id = id_file.read_text(encoding="utf-8").strip() if id_file.is_file() else ""
        if not (resume and run_id):
            run_id = uuid.uuid4().hex[:12]
            write_atomically(id_file, f"{run_id}\n".encode())
        try:
            self._run = wandb.init(
                project=cfg.SOLVER.WANDB_PROJECT,
                id=run_id,
                name=folder.resolve().name,
                dir=str(folder),
                config=yaml.safe_load(cfg.dump()),
                resume="allow" if resume else None,
            )
        except Exception as error:  # the types differ between releases of the library
            raise UserError(
                f"Weights & Biases does not start ({error}): run 'wandb login', or set "
                "WANDB_MODE=offline"
            ) from error
        self._read = NewScalars(cfg.SOLVER.LOG_PERIOD)

    def write(self) -> None:
        """Sends the scalars since the last call."""
        for iteration, scalars in self._read():
            self._run.log(scalars, step=iteration)

    def close(self) -> None:
        """Ends the run; marks it as failed if an exception is being handled."""
        self._run.finish(exit_code=1 if sys.exc_info()[0] else 0)


def check_wandb() -> Any:
    """Returns the module ``wandb``.

    Raises:
        UserError: it is not installed.
    """
    try:
        return importlib.import_module("wandb")
    except ImportError as error:
        raise UserError("SOLVER.WANDB_PROJECT needs Weights & Biases: pip install wandb") from error
