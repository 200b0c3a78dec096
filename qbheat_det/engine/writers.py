# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Where the figures of a run go: the terminal, ``metrics.json``, TensorBoard, Weights & Biases.

The writers are Detectron2's. They open their files at the first line, because only then is it
known whether a run begins or goes on.
"""

import copy
import importlib
import importlib.util
import json
import logging
import os
import sys
import uuid
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml
from detectron2.config import CfgNode
from detectron2.utils.events import (
    CommonMetricPrinter,
    EventWriter,
    JSONWriter,
    TensorboardXWriter,
    get_event_storage,
)

from qbheat_det.core.errors import UserError
from qbheat_det.core.files import write_atomically

logger = logging.getLogger(__name__)
METRICS_FILE = "metrics.json"
_WANDB_ID_FILE = "wandb_run_id.txt"


def build_writers(
    cfg: CfgNode, max_iter: int, *, iterations_per_epoch: float = 0.0
) -> list[EventWriter]:
    """Returns the writers of a run; for the main process.

    Args:
        cfg: ``OUTPUT_DIR``, ``SOLVER.LOG_PERIOD``, ``SOLVER.EPOCHS`` and ``SOLVER.WANDB_PROJECT``
            are read.
        max_iter: iterations of the whole run, for the time that remains.
        iterations_per_epoch: 0 works it out from ``SOLVER.EPOCHS``; where that is 0 too, no
            epochs are shown.

    Raises:
        UserError: Weights & Biases is asked for and not installed.
    """
    folder = Path(cfg.OUTPUT_DIR)
    window = max(1, cfg.SOLVER.LOG_PERIOD)
    if not iterations_per_epoch and cfg.SOLVER.EPOCHS:
        iterations_per_epoch = max_iter / cfg.SOLVER.EPOCHS
    writers: list[EventWriter] = [
        ProgressPrinter(max_iter, iterations_per_epoch=iterations_per_epoch, window_size=window),
        OpenedLater(lambda start: _open_json(folder / METRICS_FILE, start, window)),
    ]
    if importlib.util.find_spec("tensorboard") is None:
        logger.warning("no TensorBoard files are written: the library tensorboard is missing")
    else:
        # Steps that a resumed run makes again are hidden.
        writers.append(
            OpenedLater(lambda start: TensorboardXWriter(str(folder), window, purge_step=start))
        )
    if cfg.SOLVER.WANDB_PROJECT:
        check_wandb()
        writers.append(
            OpenedLater(
                lambda start: WandbWriter(
                    project=cfg.SOLVER.WANDB_PROJECT,
                    output_dir=folder,
                    config=yaml.safe_load(cfg.dump()),
                    resume=start > 0,
                    window_size=window,
                )
            )
        )
    return writers


def drop_metrics_from(path: str | os.PathLike[str], iteration: int) -> None:
    """Removes the lines of a ``metrics.json`` that a run resumed at ``iteration`` writes again.

    Those are the lines at or after it, and what a killed process left half-written. The file is
    replaced as a whole; one that does not exist stays so.

    Raises:
        UserError: the file cannot be written.
    """
    if not Path(path).is_file():
        return
    lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    kept = [line for line in lines if _is_before(line, iteration)]
    if len(kept) < len(lines):
        content = "".join(f"{line}\n" for line in kept).encode()
        write_atomically(path, lambda stream: stream.write(content))


class OpenedLater(EventWriter):
    """Opens a writer when there is something to write, at an iteration that is known by then."""

    def __init__(self, open_writer: Callable[[int], EventWriter]) -> None:
        """
        Args:
            open_writer: gets the iteration that this process started at.
        """
        self._open_writer = open_writer
        self._writer: EventWriter | None = None

    def write(self) -> None:
        """Writes what the storage has gathered; nothing before its first value."""
        histories = get_event_storage().histories()
        if self._writer is None and histories:
            first = min(history.values()[0][1] for history in histories.values())
            self._writer = self._open_writer(int(first))
        if self._writer is not None:
            self._writer.write()

    def close(self) -> None:
        """Closes the writer, if it was ever opened."""
        if self._writer is not None:
            self._writer.close()


class ProgressPrinter(CommonMetricPrinter):
    """Detectron2's line with losses and remaining time; epochs are put before it and recorded."""

    def __init__(
        self, max_iter: int, *, iterations_per_epoch: float = 0.0, window_size: int = 20
    ) -> None:
        """
        Args:
            max_iter: iterations of the whole run.
            iterations_per_epoch: 0 for a run without epochs.
            window_size: samples that losses are a median of.
        """
        super().__init__(max_iter, window_size)
        self._iterations_per_epoch = iterations_per_epoch
        self.logger: Any
        if iterations_per_epoch:
            self.logger = _EpochFirst(self.logger, iterations_per_epoch, max_iter)

    def write(self) -> None:
        """Prints the line, and puts ``epoch`` into the storage for the writers that follow."""
        storage = get_event_storage()
        now = any(iteration == storage.iter for _, iteration in storage.latest().values())
        if self._iterations_per_epoch and now:
            done = (storage.iter + 1) / self._iterations_per_epoch
            storage.put_scalar("epoch", done, smoothing_hint=False)
        # Detectron2 prints a median of whatever is called a loss. Over evaluations, which have a
        # "/" in their names and lines of their own, it would be one of the whole run.
        of_steps = copy.copy(storage)
        of_steps.histories = lambda: {
            name: history for name, history in storage.histories().items() if "/" not in name
        }
        with of_steps:
            super().write()


class WandbWriter(EventWriter):
    """Sends every scalar to Weights & Biases; ``WANDB_MODE=offline`` keeps them on this machine."""

    def __init__(
        self,
        *,
        project: str,
        output_dir: Path,
        config: Mapping[str, Any],
        resume: bool = False,
        window_size: int = 20,
    ) -> None:
        """
        Args:
            project: of Weights & Biases.
            output_dir: folder of the run; its name is the run's name, and it keeps the run's id.
            config: of the run.
            resume: go on with the run whose id the folder keeps.
            window_size: samples that smoothed scalars are a median of.

        Raises:
            UserError: the library is missing or will not start, for want of a login for example.
        """
        wandb = check_wandb()
        id_file = Path(output_dir) / _WANDB_ID_FILE
        run_id = id_file.read_text(encoding="utf-8").strip() if id_file.is_file() else ""
        if not (resume and run_id):
            run_id = uuid.uuid4().hex[:12]
            write_atomically(id_file, lambda stream: stream.write(f"{run_id}\n".encode()))
        try:
            self._run = wandb.init(
                project=project,
                id=run_id,
                name=Path(output_dir).resolve().name,
                dir=str(output_dir),
                config=dict(config),
                resume="allow" if resume else None,
            )
        except Exception as error:  # the library's own, of which each release has others
            raise UserError(
                f"Weights & Biases does not start ({error}): run 'wandb login', set "
                "WANDB_MODE=offline in the environment, or leave SOLVER.WANDB_PROJECT empty"
            ) from error
        self._window_size = window_size
        self._last_write = -1

    def write(self) -> None:
        """Sends what is newer than the last call."""
        latest = get_event_storage().latest_with_smoothing_hint(self._window_size)
        by_iteration: dict[int, dict[str, float]] = defaultdict(dict)
        for name, (value, iteration) in latest.items():
            if iteration > self._last_write:
                by_iteration[iteration][name] = value
        for iteration, scalars in sorted(by_iteration.items()):
            self._run.log(scalars, step=iteration)
            self._last_write = iteration

    def close(self) -> None:
        """Ends the run; as failed where an exception is on its way up."""
        self._run.finish(exit_code=1 if sys.exc_info()[0] else 0)


def check_wandb() -> Any:
    """Returns the library of Weights & Biases.

    Raises:
        UserError: it is not installed.
    """
    try:
        wandb = importlib.import_module("wandb")
    except ImportError as error:
        raise UserError(
            "SOLVER.WANDB_PROJECT asks for Weights & Biases, which is not installed: "
            "pip install 'qbheat_det[wandb]', or leave the key empty"
        ) from error
    online = os.environ.get("WANDB_MODE", "online") == "online"
    if online and getattr(getattr(wandb, "api", None), "api_key", "unknown") is None:
        raise UserError(
            "SOLVER.WANDB_PROJECT asks for Weights & Biases, which knows no login here: run 'wandb "
            "login', set WANDB_MODE=offline in the environment, or leave the key empty"
        )
    return wandb


class _EpochFirst:
    """Stands in for the printer's logger and puts the epoch before its line."""

    def __init__(self, target: logging.Logger, iterations_per_epoch: float, max_iter: int) -> None:
        self._target = target
        self._iterations_per_epoch = iterations_per_epoch
        self._total = max_iter / iterations_per_epoch

    def info(self, line: str) -> None:
        done = (get_event_storage().iter + 1) / self._iterations_per_epoch
        self._target.info("epoch: %.2f/%.4g %s", done, self._total, line)


def _open_json(path: Path, start: int, window: int) -> EventWriter:
    if start == 0 and path.is_file() and path.stat().st_size:  # of an earlier run
        number = 1
        while (aside := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
            number += 1
        os.replace(path, aside)
        logger.warning("%s was of an earlier run and is now %s", path, aside.name)
    return JSONWriter(str(path), window)


def _is_before(line: str, iteration: int) -> bool:
    try:
        record = json.loads(line)
        return isinstance(record, dict) and record.get("iteration", 0) < iteration
    except (ValueError, TypeError):
        return False
