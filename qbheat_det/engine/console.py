# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What a run prints: a summary, warnings, and its progress. ``log.txt`` has every message."""

import contextlib
import json
import logging
import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from detectron2.config import CfgNode
from detectron2.evaluation.testing import flatten_results_dict
from detectron2.utils.events import EventWriter, get_event_storage
from torch import nn
from tqdm import tqdm

from qbheat_det.core.errors import UserError, is_lost_peer

T = TypeVar("T")
_PACKAGE = str(Path(__file__).resolve().parents[1])
_LOGGERS = ("detectron2", "fvcore", "qbheat_det")
_opened: list[logging.Handler] = []  # of the last run of this process


def open_log(folder: Path, *, rank: int = 0) -> None:
    """Writes all messages to ``log.txt``, and prints the summary on the main process.

    Args:
        folder: of the run; a second run in one process no longer writes to the log of the first.
        rank: of this process; others than the first write to ``log.txt.rank<rank>``.
    """
    for handler in _opened:
        for name in _LOGGERS:
            logging.getLogger(name).removeHandler(handler)
        handler.close()
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


class _LogFile(logging.FileHandler):
    """Keeps quiet where the disk is full: the next file that matters says so."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass

    def close(self) -> None:
        with contextlib.suppress(OSError):
            super().close()


class _SummaryHandler(logging.Handler):
    """Prints what this package says, and warnings of Detectron2, above the progress bars."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.setFormatter(logging.Formatter("[%(asctime)s] %(message)s", datefmt="%H:%M:%S"))

    def filter(self, record: logging.LogRecord) -> bool:
        # Some classes here log by the logger of the Detectron2 class that they extend.
        is_own = record.name.startswith("qbheat_det") or record.pathname.startswith(_PACKAGE)
        error = record.exc_info[1] if record.exc_info else None  # of a lost one, a sentence follows
        return (is_own or record.levelno >= logging.WARNING) and not is_lost_peer(error)

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        if record.levelno >= logging.WARNING:
            text = text.replace("] ", f"] {record.levelname.lower()}: ", 1)
        tqdm.write(text, file=sys.stderr)


def filter_detectron2_logs() -> None:
    """Removes messages of Detectron2 that would be repeated, or are expected."""
    logging.getLogger("detectron2.engine.train_loop").addFilter(_is_no_user_error)
    logging.getLogger("detectron2.data.datasets.coco").addFilter(_is_not_about_ids)


def _is_no_user_error(record: logging.LogRecord) -> bool:
    # It is printed at the end; Detectron2's loop would log a traceback before it.
    return not (record.exc_info and isinstance(record.exc_info[1], UserError))


def _is_not_about_ids(record: logging.LogRecord) -> bool:
    return "Category ids in annotations" not in str(record.msg)  # holes in them are supported


def is_interactive() -> bool:
    """Whether a person reads what is printed: on a terminal or in a notebook, not in a pipe."""
    return (sys.stdout.isatty() and sys.stderr.isatty()) or "ipykernel" in sys.modules


def track(items: Iterable[T], *, title: str, unit: str = "batch") -> Iterable[T]:
    """Returns the items, under a progress bar where a person reads.

    The length of what is returned is that of ``items``.
    """
    return tqdm(items, desc=title, unit=unit, leave=False, delay=1, disable=not is_interactive())


class NewScalars:
    """Reads what has been put into Detectron2's storage since the last call, for a writer."""

    def __init__(self, window_size: int) -> None:
        """``window_size`` is the number of iterations over which Detectron2 takes medians."""
        self._window_size = window_size
        self._last = -1

    def __call__(self) -> list[tuple[int, dict[str, float]]]:
        """Returns iterations in their order, each with its scalars by name."""
        by_iteration: dict[int, dict[str, float]] = defaultdict(dict)
        latest = get_event_storage().latest_with_smoothing_hint(self._window_size)
        for name, (value, iteration) in latest.items():
            if iteration > self._last:
                by_iteration[iteration][name] = value
        self._last = max(by_iteration, default=self._last)
        return sorted(by_iteration.items())


class JSONPrinter(EventWriter):
    """Prints what ``metrics.json`` gets: one line of JSON for each iteration with new scalars."""

    def __init__(self, window_size: int) -> None:
        self._read = NewScalars(window_size)

    def write(self) -> None:
        """Prints the scalars that are newer than the last call."""
        for iteration, scalars in self._read():
            print_json({"iteration": iteration, **scalars})


def print_json(values: Mapping[str, float]) -> None:
    """Prints a line of JSON, six digits a number; null stands for what is not finite.

    A reader that has gone away, such as ``head``, does not end the run.
    """
    finite = {k: float(f"{v:.6g}") if math.isfinite(v) else None for k, v in values.items()}
    with contextlib.suppress(BrokenPipeError):
        print(json.dumps(finite), flush=True)


def print_results(results: Mapping[str, Any]) -> None:
    """Prints the results of an evaluation as ``{"bbox/AP": …}``, unless a person has read them."""
    if not is_interactive():
        print_json(flatten_results_dict(results))


def describe_model(cfg: CfgNode, model: nn.Module) -> str:
    """Returns a line on a model and its size."""
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    total, trained = sum(size for size, _ in sizes), sum(size for size, free in sizes if free)
    return (
        f"{cfg.MODEL.META_ARCHITECTURE} on {cfg.MODEL.DEVICE}: {total / 1e6:.2f} M parameters, "
        f"{trained / 1e6:.2f} M of them trained"
    )
