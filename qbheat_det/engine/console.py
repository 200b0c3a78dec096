# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Prints a run's summary, warnings and progress, and writes every message to ``log.txt``."""

import contextlib
import json
import logging
import math
import os
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from detectron2.config import CfgNode
from detectron2.evaluation.testing import flatten_results_dict
from detectron2.utils.events import EventWriter, get_event_storage
from torch import nn
from tqdm import tqdm

from qbheat_det.core.errors import UserError, is_lost_peer
from qbheat_det.data import SPLIT_FILE

T = TypeVar("T")
_PACKAGE = str(Path(__file__).resolve().parents[1])
_LOGGERS = ("detectron2", "fvcore", "qbheat_det")
_opened: list[logging.Handler] = []  # handlers of the last run in this process


def open_log(folder: Path, *, rank: int = 0) -> None:
    """Writes all messages to ``log.txt``, and prints a summary on the main process.

    Closes the log of an earlier run in this process. Processes with a ``rank`` above 0 write to
    ``log.txt.rank<rank>``.
    """
    _close_log()
    file = _LogFile(folder / f"log.txt{f'.rank{rank}' if rank else ''}", delay=True)
    file.setFormatter(
        logging.Formatter(
            "[%(asctime)s] %(name)s %(levelname)s: %(message)s", datefmt="%m/%d %H:%M:%S"
        )
    )
    _opened[:] = [file] if rank else [file, _SummaryHandler()]
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        logger.setLevel(logging.DEBUG)
        logger.propagate = False
        for handler in _opened:
            logger.addHandler(handler)
    filter_detectron2_logs()


@contextlib.contextmanager
def removes_empty_run(folder: Path) -> Iterator[None]:
    """Removes the folder of a run after a ``UserError`` if it has nothing but the log."""
    try:
        yield
    except UserError:
        if {path.name for path in folder.iterdir()} <= {"log.txt", SPLIT_FILE}:
            _close_log()
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _close_log() -> None:
    for handler in _opened:
        for name in _LOGGERS:
            logging.getLogger(name).removeHandler(handler)
        handler.close()
    _opened.clear()


class _LogFile(logging.FileHandler):
    """Ignores a full disk: the next checkpoint reports it."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass

    def close(self) -> None:
        with contextlib.suppress(OSError):
            super().close()


class _SummaryHandler(logging.Handler):
    """Prints this package's messages and Detectron2's warnings above the progress bars.

    Without progress bars, it prints Detectron2's line of progress as well.
    """

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.setFormatter(logging.Formatter("[%(asctime)s] %(message)s", datefmt="%H:%M:%S"))

    def filter(self, record: logging.LogRecord) -> bool:
        # Some classes use the logger of the Detectron2 class that they extend.
        is_own = record.name.startswith("qbheat_det") or record.pathname.startswith(_PACKAGE)
        is_progress = record.name == "detectron2.utils.events" and not is_interactive()
        error = record.exc_info[1] if record.exc_info else None
        is_shown = is_own or is_progress or record.levelno >= logging.WARNING
        return is_shown and not is_lost_peer(error)

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        if record.levelno >= logging.WARNING:
            text = text.replace("] ", f"] {record.levelname.lower()}: ", 1)
        tqdm.write(text, file=sys.stderr)


def filter_detectron2_logs() -> None:
    """Removes Detectron2's messages that are repeated elsewhere or expected."""
    logging.getLogger("detectron2.engine.train_loop").addFilter(_is_no_user_error)
    logging.getLogger("detectron2.data.datasets.coco").addFilter(_is_not_about_ids)


def _is_no_user_error(record: logging.LogRecord) -> bool:
    # The tool prints it at the end; Detectron2's loop would log a traceback before.
    return not (record.exc_info and isinstance(record.exc_info[1], UserError))


def _is_not_about_ids(record: logging.LogRecord) -> bool:
    return "Category ids in annotations" not in str(record.msg)  # gaps are supported


def is_interactive() -> bool:
    """Whether messages go to a terminal or a notebook, where progress bars are drawn."""
    return sys.stderr.isatty() or "ipykernel" in sys.modules


def prints_json() -> bool:
    """Whether stdout takes metrics as lines of JSON: it is a file or pipe without the messages.

    With ``2>&1``, stdout and stderr are one file, which gets the messages alone.
    """
    if sys.stdout.isatty() or "ipykernel" in sys.modules:
        return False
    try:
        return not os.path.sameopenfile(sys.stdout.fileno(), sys.stderr.fileno())
    except (OSError, ValueError):  # a stream without a file
        return True


def track(items: Iterable[T], *, title: str, unit: str = "batch") -> Iterable[T]:
    """Returns the items with a progress bar if the output is interactive; ``len`` is kept."""
    return tqdm(items, desc=title, unit=unit, leave=False, delay=1, disable=not is_interactive())


class NewScalars:
    """Reads the scalars that were put into Detectron2's storage since the last call."""

    def __init__(self, window_size: int) -> None:
        """``window_size`` is the number of iterations of Detectron2's medians."""
        self._window_size = window_size
        self._last = -1

    def __call__(self) -> list[tuple[int, dict[str, float]]]:
        """Returns iterations in ascending order, each with its scalars by name."""
        by_iteration: dict[int, dict[str, float]] = defaultdict(dict)
        latest = get_event_storage().latest_with_smoothing_hint(self._window_size)
        for name, (value, iteration) in latest.items():
            if iteration > self._last:
                by_iteration[iteration][name] = value
        self._last = max(by_iteration, default=self._last)
        return sorted(by_iteration.items())


class JSONPrinter(EventWriter):
    """Prints the lines of ``metrics.json``: one per iteration with new scalars."""

    def __init__(self, window_size: int) -> None:
        self._read = NewScalars(window_size)

    def write(self) -> None:
        """Prints the scalars since the last call."""
        for iteration, scalars in self._read():
            print_json({"iteration": iteration, **scalars})


def print_json(values: Mapping[str, float]) -> None:
    """Prints a line of JSON with six significant digits, and null for inf and nan.

    A closed pipe, as after ``| head``, does not end the run.
    """
    finite = {k: float(f"{v:.6g}") if math.isfinite(v) else None for k, v in values.items()}
    with contextlib.suppress(BrokenPipeError):
        print(json.dumps(finite), flush=True)


def print_results(results: Mapping[str, Any]) -> None:
    """Prints an evaluation's results as ``{"bbox/AP": …}`` if stdout takes JSON."""
    if prints_json():
        print_json(flatten_results_dict(results))


def describe_model(cfg: CfgNode, model: nn.Module) -> str:
    """Returns a line with the name, device and size of a model."""
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    total, trained = sum(size for size, _ in sizes), sum(size for size, free in sizes if free)
    return (
        f"{cfg.MODEL.META_ARCHITECTURE} on {cfg.MODEL.DEVICE}: {total / 1e6:.2f} M parameters, "
        f"{trained / 1e6:.2f} M of them trained"
    )
