# Copyright (c) qbheat_det contributors. Apache-2.0.
"""How a run stops, and how it continues.

- ``check_same_config`` and ``check_same_images`` compare a resumed run with its checkpoint.
- ``StopSignals`` saves a checkpoint after Ctrl-C or a scheduler's signal, and
  ``YieldToNewerStart`` ends a run that was restarted elsewhere.
"""

import fnmatch
import logging
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from detectron2.config import CfgNode
from detectron2.engine import HookBase
from detectron2.utils import comm

from qbheat_det.config import dump_config, get_cfg
from qbheat_det.config.loading import EPOCH_KEYS, read_values
from qbheat_det.core.errors import UserError
from qbheat_det.core.files import RUN_FILE
from qbheat_det.core.termination import Interrupted
from qbheat_det.data import TrainStream

from .hooks import EvalHook, is_saved
from .run_record import find_launch, read_run_record

logger = logging.getLogger(__name__)
WAITING_SECONDS = 5.0  # that a step waits for its batch after a signal to stop
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)

# Patterns of keys that may change in a resumed run: device, speed, evaluation and logs.
_CHANGEABLE = (
    "CUDNN_BENCHMARK",
    "DATALOADER.NUM_WORKERS",
    "DATASETS.CHECK_IMAGES",
    "DATASETS.MAX_LEFT_OUT",
    "DATASETS.TEST",
    "FLOAT32_PRECISION",
    "MODEL.*.TOPK_CANDIDATES_TEST",
    "MODEL.CACHE_FEATURES.FOLDER",
    "MODEL.CHANNELS_LAST",
    "MODEL.DEPLOY.*",
    "MODEL.DEVICE",
    "MODEL.RPN.*_TOPK_TEST",
    "OUTPUT_DIR",
    "SOLVER.ACCUMULATE",
    "SOLVER.CHECKPOINT*",
    "SOLVER.KEEP_MEMORY",
    "SOLVER.LOG_*",
    "TEST.*",
    "VIS_PERIOD",
)
# Keys of the length of a run, which may change with a warning.
_LENGTH = ("SOLVER.EPOCHS", "SOLVER.MAX_ITER", "SOLVER.MIN_ITER")
# Keys from which the keys in iterations are computed, besides their own key in epochs.
_BASIS = ("SOLVER.EPOCHS", "SOLVER.MIN_ITER", "SOLVER.IMS_PER_BATCH")


def check_same_config(saved: str, cfg: CfgNode) -> dict[str, object]:
    """Compares the config of a resumed run with that in its checkpoint, and logs allowed changes.

    Args:
        saved: the config in the checkpoint, as YAML; may be empty.
        cfg: config of the resumed run.

    Returns:
        The values in the checkpoint, by dotted key.

    Raises:
        UserError: a key that must not change differs.
    """
    before = read_values(saved)
    now = read_values(dump_config(cfg))
    # An earlier version, whose configs lack a key, did what the default of the key does.
    with_defaults = {**read_values(dump_config(get_cfg())), **before} if before else {}
    changes: dict[str, str] = {}  # text about each key that differs
    for key in sorted(now.keys() & with_defaults.keys()):
        if key == "MODEL.WEIGHTS":  # a resumed run does not read them
            continue
        if key == "SEED" and cfg.SEED < 0:  # the run keeps its seed
            continue
        if with_defaults[key] != now[key]:
            changes[key] = f"{key} {with_defaults[key]} -> {now[key]}"
    allowed_patterns = (*_CHANGEABLE, *_LENGTH)
    refused = []
    for key in changes:
        if not any(fnmatch.fnmatch(key, pattern) for pattern in allowed_patterns):
            refused.append(key)
    if refused:
        described = "; ".join(_describe_refused(refused, changes, now))
        text = f"--resume continues a run unchanged, but the config differs: {described}"
        if cfg.DATASETS.UNLABELLED and "SOLVER." in text:
            text += ". Other --unlabelled images change the number of iterations"
        raise UserError(text)
    for key, change in changes.items():
        level = logging.WARNING if key in _LENGTH else logging.INFO
        logger.log(level, f"Changed since the checkpoint: {change}")
    return before


def _describe_refused(
    refused: Sequence[str], changes: Mapping[str, str], values: Mapping[str, object]
) -> list[str]:
    """Returns texts about keys that must not change, first about those that others follow from.

    Args:
        refused: the keys.
        changes: maps each key that differs to a text about it.
        values: the values of the resumed run.
    """
    derived = []  # keys in iterations that are computed from keys in epochs
    causes = []
    for epochs, iterations in EPOCH_KEYS.items():
        basis = [key for key in (epochs, *_BASIS) if key in changes]
        is_computed = epochs in changes or values.get(epochs)
        if iterations in refused and is_computed and basis:
            derived.append(iterations)
            causes += basis
    texts = []
    if derived:
        reasons = " and ".join(changes[key] for key in dict.fromkeys(causes))
        results = " and ".join(changes[key] for key in derived)
        texts.append(
            f"{reasons}, from which {results} {'follows' if len(derived) == 1 else 'follow'}"
        )
    return texts + [changes[key] for key in refused if key not in derived and key not in causes]


def check_same_images(state: Mapping[str, Any], stream: TrainStream) -> None:
    """Checks that a resumed run has the same training images as its checkpoint.

    Raises:
        UserError: the images differ, or the checkpoint is not of this package's trainer.
    """
    if "num_images" not in state:
        raise UserError(
            "--resume needs a checkpoint of this package's trainer: start a new run with "
            "MODEL.WEIGHTS"
        )
    before = state["num_images"]
    now = stream.num_images
    if before == now and state["fingerprint"] == stream.fingerprint:
        return
    change = "their order or their boxes have changed"
    if before != now:
        change = f"there are {now} now"
    also = ""
    if stream.unlabelled:
        also = " (also counting those of --unlabelled)"
    raise UserError(f"--resume continues a run on {before} training images{also}, but {change}")


class StopSignals(HookBase):
    """Ends a run on SIGINT, SIGTERM or SIGUSR1; must be the last hook.

    The run stops after the present step, with a checkpoint. Processes tell each other about signals
    together with the losses of a step. So all processes know about a signal before the checkpoint
    hook runs, and stop after the same step.

    If the step gets no batch for some seconds, the run stops without a checkpoint of the step.

    During an evaluation, a signal stops the run immediately. The step is saved, and ``--resume``
    starts with the evaluation. A second Ctrl-C ends the process immediately, but not under
    torchrun, which itself sends the first signal again.
    """

    trainer: Any

    def __init__(self) -> None:
        self._number = 0  # of the first signal; 0 if there was none
        self._previous_handlers: dict[int, Any] = {}  # by number of the signal

    def before_train(self) -> None:
        """Installs the signal handlers; Python allows this only in the main thread."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in _SIGNALS:
            self._previous_handlers[number] = signal.signal(number, self._note)
        self._previous_handlers[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._end_waiting)

    def after_train(self) -> None:
        """Restores the previous signal handlers."""
        if self._previous_handlers:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)
        self._previous_handlers = {}

    def after_step(self) -> None:
        """Ends the run if any process received a signal.

        Raises:
            Interrupted: a process received a signal. All raise it after the checkpoint is saved.
        """
        if self.trainer.stops:
            comm.synchronize()  # torchrun ends the others after the first exit
            raise self._interrupt()

    def _note(self, number: int, frame: FrameType | None) -> None:
        """The signal handler: asks the run to stop, or ends an evaluation or the process."""
        is_second = self._number != 0
        if not is_second:
            self._number = number
        if is_second and number == signal.SIGINT and not find_launch():
            raise KeyboardInterrupt
        if self.trainer.find_hook(EvalHook).is_evaluating:
            raise self._interrupt()
        self.trainer.ask_to_stop()
        signal.setitimer(signal.ITIMER_REAL, 1, 1)  # calls ``_end_waiting`` each second
        if comm.is_main_process() and not is_second:
            name = signal.Signals(number).name.encode()
            message = b"\n%s: stopping after this step, with a checkpoint\n" % name
            os.write(2, message)  # to stderr; ``print`` is not safe in a signal handler

    def _end_waiting(self, number: int, frame: FrameType | None) -> None:
        """Ends a run that was asked to stop, but gets no batch for its step."""
        since = self.trainer.data_loader.waiting_since
        if since is None or time.monotonic() - since < WAITING_SECONDS:
            return
        raise Interrupted(
            self._number,
            f"stopped by {signal.Signals(self._number).name} while waiting for a batch: --resume "
            f"continues from the last checkpoint in '{self.trainer.cfg.OUTPUT_DIR}'",
        )

    def _interrupt(self) -> Interrupted:
        """Returns the error that ends the run."""
        run = self.trainer
        number = self._number or signal.SIGTERM  # 0 if only another process received a signal
        num_done = min(run.iter + 1, run.max_iter)
        return Interrupted(
            number,
            f"stopped by {signal.Signals(number).name} after {num_done} of {run.max_iter} "
            f"iterations: --resume continues from the checkpoint in '{run.cfg.OUTPUT_DIR}'",
        )


class YieldToNewerStart(HookBase):
    """Ends this process before it overwrites the checkpoints of a newer start of the same run.

    If torchrun considers a slow machine dead, it restarts the run without that machine, although
    the old processes may still run there.
    """

    trainer: Any

    def before_train(self) -> None:
        """Counts the starts in ``run.json``, including this one."""
        self._file = Path(self.trainer.cfg.OUTPUT_DIR) / RUN_FILE
        self._num_starts = len(read_run_record(self._file))

    def after_step(self) -> None:
        """Checks for a later start whenever weights may be saved.

        Raises:
            UserError: the run has a later start.
        """
        run = self.trainer
        is_evaluated = run.find_hook(EvalHook).is_due()
        if not is_evaluated and not is_saved(run, run.cfg.SOLVER.CHECKPOINT_PERIOD):
            return
        later_starts = read_run_record(self._file)[self._num_starts :]
        if later_starts:
            started = later_starts[0].get("started")
            raise UserError(
                f"'{self._file}' has a later start, at {started}: this process ends without saving"
            )
