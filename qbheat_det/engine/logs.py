# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Logs of a run: messages, progress bars, and metrics in files and TensorBoard."""

import contextlib
import copy
import json
import logging
import math
import shutil
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

from detectron2.config import CfgNode
from detectron2.engine import hooks
from detectron2.evaluation.testing import flatten_results_dict
from detectron2.utils.events import (
    CommonMetricPrinter,
    EventWriter,
    JSONWriter,
    TensorboardXWriter,
    get_event_storage,
)
from timm.layers import FrozenBatchNormAct2d
from torch import nn
from tqdm import tqdm

from qbheat_det.checkpoint import info_of
from qbheat_det.core.errors import UserError, is_lost_peer
from qbheat_det.core.files import write_atomically
from qbheat_det.core.text import escape_controls
from qbheat_det.data import LEFT_OUT_FILE, SEEN_FILE, SPLIT_FILE
from qbheat_det.modeling.contracts import get_backbone, get_encoder

from .hooks import TrainingRun
from .run_record import LOCK_FILE

logger = logging.getLogger(__name__)
_PACKAGE = str(Path(__file__).resolve().parents[1])
_LOGGERS = ("detectron2", "fvcore", "qbheat_det")
_opened: list[logging.Handler] = []  # handlers of the last run in this process


def open_log(folder: Path, *, rank: int = 0) -> None:
    """Logs all messages to ``log.txt``; the main process also prints the most important ones.

    Closes the log of an earlier run in this process. Processes with a ``rank`` above 0 write to
    ``log.txt.rank<rank>``.
    """
    _close_log()
    name = f"log.txt.rank{rank}" if rank else "log.txt"
    file = _LogFile(folder / name, delay=True)
    file.setFormatter(
        logging.Formatter(
            "[%(asctime)s] %(name)s %(levelname)s: %(message)s", datefmt="%m/%d %H:%M:%S"
        )
    )
    _opened.append(file)
    if rank == 0:
        _opened.append(_SummaryHandler())
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        logger.setLevel(logging.DEBUG)
        logger.propagate = False
        for handler in _opened:
            logger.addHandler(handler)
    filter_detectron2_logs()


@contextlib.contextmanager
def removes_empty_run(folder: Path) -> Iterator[None]:
    """Context that removes the folder of a run if a ``UserError`` prevents the start of training.

    The folder is kept if it has other files than those that are written before training.
    """
    try:
        yield
    except UserError:
        written_before_training = {"log.txt", LEFT_OUT_FILE, LOCK_FILE, SEEN_FILE, SPLIT_FILE}
        names = {path.name for path in folder.iterdir()}
        if names <= written_before_training:
            _close_log()
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _close_log() -> None:
    """Removes and closes the handlers that ``open_log`` added."""
    for handler in _opened:
        for name in _LOGGERS:
            logging.getLogger(name).removeHandler(handler)
        handler.close()
    _opened.clear()


class _LogFile(logging.FileHandler):
    """A log file that ignores errors of writing, since the next checkpoint reports a full disk."""

    def format(self, record: logging.LogRecord) -> str:
        return escape_controls(super().format(record))

    def handleError(self, record: logging.LogRecord) -> None:
        pass

    def close(self) -> None:
        with contextlib.suppress(OSError):
            super().close()


class _SummaryHandler(logging.Handler):
    """Prints this package's messages, and all warnings, above the progress bars.

    If there are no progress bars, also prints Detectron2's progress line.
    """

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.setFormatter(logging.Formatter("[%(asctime)s] %(message)s", datefmt="%H:%M:%S"))

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a message is printed."""
        # Some classes of this package use the logger of the Detectron2 class that they extend, so
        # the file is compared too.
        is_of_package = record.name.startswith("qbheat_det") or record.pathname.startswith(_PACKAGE)
        is_progress_line = record.name == "detectron2.utils.events" and not is_interactive()
        is_warning = record.levelno >= logging.WARNING
        if not (is_of_package or is_progress_line or is_warning):
            return False
        error = record.exc_info[1] if record.exc_info else None
        return not is_lost_peer(error)

    def emit(self, record: logging.LogRecord) -> None:
        text = escape_controls(self.format(record))
        if record.levelno >= logging.WARNING:
            text = text.replace("] ", f"] {record.levelname.lower()}: ", 1)
        tqdm.write(text, file=sys.stderr)


def filter_detectron2_logs() -> None:
    """Hides messages of Detectron2 that are expected, or that this package prints itself."""
    logging.getLogger("detectron2.data.datasets.coco").addFilter(_is_not_about_ids)


def _is_not_about_ids(record: logging.LogRecord) -> bool:
    """Whether a message is not the warning about gaps in category ids, which are supported."""
    return "Category ids in annotations" not in str(record.msg)


def is_interactive() -> bool:
    """Whether messages go to a terminal or a notebook, where progress bars are drawn."""
    return sys.stderr.isatty() or "ipykernel" in sys.modules


def print_results(results: Mapping[str, Any]) -> None:
    """Prints the results of an evaluation as one line of JSON, such as ``{"bbox/AP": 40.1}``.

    Does nothing on a terminal, where the log shows the results. Non-finite values become null.
    """
    if sys.stdout.isatty():
        return
    rounded: dict[str, float | None] = {}
    for name, value in flatten_results_dict(results).items():
        rounded[name] = None
        if math.isfinite(value):
            rounded[name] = float(f"{value:.6g}")  # six significant digits
    print(json.dumps(rounded))


def describe_model(cfg: CfgNode, model: nn.Module) -> str:
    """Returns one line with the name, device and numbers of parameters of a model."""
    num_parameters = 0
    num_trained = 0
    for parameter in model.parameters():
        num_parameters += parameter.numel()
        if parameter.requires_grad:
            num_trained += parameter.numel()
    return (
        f"{cfg.MODEL.META_ARCHITECTURE} on {cfg.MODEL.DEVICE}: {num_parameters / 1e6:.2f} M "
        f"parameters, {num_trained / 1e6:.2f} M of them trained"
    )


def warn_of_weights(model: nn.Module, cfg: CfgNode) -> None:
    """Warns if a frozen encoder has random weights, or ``INPUT.FORMAT`` does not fit the weights.

    The checkpointer warns of pixel statistics that do not fit the weights.
    """
    weights = cfg.MODEL.WEIGHTS
    if weights:
        info = info_of(weights)
        if info and info.pixel_format not in ("", cfg.INPUT.FORMAT):
            logger.warning(f"'{weights}' is for {info.pixel_format} pixels: set INPUT.FORMAT")
        return
    backbone = get_backbone(model)
    if backbone is None:
        return
    encoder = get_encoder(backbone)
    parameters = list(encoder.parameters())
    if parameters and not any(parameter.requires_grad for parameter in parameters):
        logger.warning(
            f"The {type(encoder).__name__} is frozen with random weights: set MODEL.WEIGHTS, "
            "unless this is a baseline"
        )
    elif any(isinstance(module, FrozenBatchNormAct2d) for module in encoder.modules()):
        logger.warning(
            f"The {type(encoder).__name__} has random weights and frozen BatchNorms: set "
            "MODEL.WEIGHTS, or MODEL.BACKBONE.FREEZE_AT 0 MODEL.TIMM.FREEZE_NORMS False"
        )


class PeriodicWriter(hooks.PeriodicWriter):
    """Detectron2's hook, with writers that are opened when training starts or resumes.

    After an error, the writers are closed without writing, because the step is incomplete, and
    because an error of a writer would hide the original error.
    """

    trainer: TrainingRun

    def __init__(self, period: int) -> None:
        super().__init__([], period)

    def before_train(self) -> None:
        """Opens the writers, and removes the lines of ``metrics.json`` that will be repeated."""
        run = self.trainer
        cfg = run.cfg
        iterations_per_epoch = run.data_loader.num_images / cfg.SOLVER.IMS_PER_BATCH
        folder = Path(cfg.OUTPUT_DIR)
        window = cfg.SOLVER.LOG_PERIOD  # number of iterations whose median is written
        drop_metrics_from(folder / "metrics.json", run.start_iter)
        self._printer = ProgressPrinter(
            run.max_iter, iterations_per_epoch=iterations_per_epoch, window_size=window
        )
        self._writers: list[EventWriter] = [
            self._printer,
            JSONWriter(str(folder / "metrics.json"), window),
            # ``purge_step`` hides the steps that a resumed run repeats.
            TensorboardXWriter(str(folder), window, purge_step=run.start_iter),
        ]
        self._bar = tqdm(
            desc="training",
            initial=run.start_iter,
            total=run.max_iter,
            disable=not is_interactive(),
        )

    def after_step(self) -> None:
        """Updates the progress bar, and writes at the end of each period."""
        if self._bar.total != self.trainer.max_iter:
            self._bar.total = self.trainer.max_iter
            self._printer.move_end(self.trainer.max_iter)
        self._bar.update()
        super().after_step()
        if self._bar.n % self._period == 0 and not self._bar.disable:
            latest = self.trainer.storage.latest()
            names = [name for name in ("epoch", "total_loss") if name in latest]
            self._bar.set_postfix({name: f"{latest[name][0]:.4g}" for name in names})

    def after_train(self) -> None:
        """Closes the writers; if the run is complete, writes the remaining scalars first."""
        self._bar.close()
        if self.trainer.iter >= self.trainer.max_iter:
            super().after_train()
            return
        for writer in self._writers:
            writer.close()


def drop_metrics_from(path: Path, iteration: int) -> None:
    """Removes incomplete lines of ``metrics.json``, and lines of ``iteration`` and later."""
    if not path.is_file():
        return
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    kept = [line for line in lines if _is_before(line, iteration)]
    if len(kept) < len(lines):
        write_atomically(path, "".join(f"{line}\n" for line in kept).encode())


def _is_before(line: str, iteration: int) -> bool:
    """Whether a line of ``metrics.json`` is complete and of an earlier iteration."""
    try:
        return bool(json.loads(line).get("iteration", 0) < iteration)
    except (AttributeError, ValueError, TypeError):
        return False


class ProgressPrinter(CommonMetricPrinter):
    """Logs Detectron2's progress line, prefixed with the epoch."""

    def __init__(self, max_iter: int, *, iterations_per_epoch: float, window_size: int) -> None:
        super().__init__(max_iter, window_size)
        self._iterations_per_epoch = iterations_per_epoch
        self.logger: Any = _EpochPrefix(self.logger, {})
        self.move_end(max_iter)

    def move_end(self, max_iter: int) -> None:
        """Changes the number of iterations of the run."""
        self._max_iter = max_iter
        self.logger.extra["epochs"] = max_iter / self._iterations_per_epoch

    def write(self) -> None:
        """Logs the progress line, and adds ``epoch`` to the event storage."""
        storage = get_event_storage()
        epoch = (storage.iter + 1) / self._iterations_per_epoch
        self.logger.extra["epoch"] = epoch
        latest_iterations = [iteration for _, iteration in storage.latest().values()]
        if storage.iter in latest_iterations:
            storage.put_scalar("epoch", epoch, smoothing_hint=False)
        # Detectron2 prints the median of every scalar with "loss" in its name. Scalars with "/" are
        # results of evaluations, which are logged separately, so they are hidden from Detectron2.
        histories = storage.histories()
        step_histories = {name: histories[name] for name in histories if "/" not in name}
        storage_of_steps = copy.copy(storage)
        storage_of_steps.histories = lambda: step_histories
        with storage_of_steps:
            super().write()


class _EpochPrefix(logging.LoggerAdapter):  # type: ignore[type-arg]
    def process(
        self, msg: str, kwargs: MutableMapping[str, Any]
    ) -> tuple[str, MutableMapping[str, Any]]:
        extra: Any = self.extra
        return f"epoch: {extra['epoch']:.2f}/{extra['epochs']:.4g} {msg}", kwargs
