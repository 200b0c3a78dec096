# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Copies a run to ``SOLVER.CHECKPOINT_URL``, so that any machine can resume it."""

import logging
import subprocess
import sys
from pathlib import Path

from detectron2.config import CfgNode
from detectron2.engine import HookBase

from qbheat_det.core.errors import UserError

from . import transfer
from .hooks import SKIPPED_FILE, TrainingRun

logger = logging.getLogger(__name__)
_FILES = (
    *("config.yaml", "run.json", "split.json", "metrics.json", SKIPPED_FILE),
    *("model_best.safetensors", "model_final.safetensors"),
)


def fetch_run(cfg: CfgNode) -> None:
    """Copies the last checkpoint and its run's files from the URL to ``OUTPUT_DIR``.

    Raises:
        UserError: the URL cannot be read.
    """
    if reason := _finish(_start(cfg, "fetch", *_FILES)):
        raise UserError(f"SOLVER.CHECKPOINT_URL '{cfg.SOLVER.CHECKPOINT_URL}': {reason}")


class Mirror(HookBase):
    """Uploads each new checkpoint and the changed files of the run, in the background.

    If a transfer fails, the error is logged, and all files are sent again with the next checkpoint.
    """

    trainer: TrainingRun

    def __init__(self, cfg: CfgNode) -> None:
        self._cfg, self._folder = cfg, Path(cfg.OUTPUT_DIR)
        self._tag = self._folder / transfer.TAG
        self._process: subprocess.Popen[str] | None = None
        self._sent: dict[str, int] = {}  # modification time by file name

    def before_train(self) -> None:
        """Marks the checkpoint that the run resumes from as sent, so that it is not sent again."""
        self._sent[transfer.TAG] = self._changed(transfer.TAG)

    def after_step(self) -> None:
        """If there is a new checkpoint, waits for the previous transfer and starts the next."""
        if self._changed(transfer.TAG) == self._sent[transfer.TAG]:
            return
        self._wait()
        names = [*_FILES, self._tag.read_text(encoding="utf-8").strip(), transfer.TAG]
        times = {name: time for name in names if (time := self._changed(name))}
        new = [name for name, time in times.items() if self._sent.get(name) != time]
        self._sent.update(times)
        self._process = _start(self._cfg, "send", str(self._cfg.SOLVER.CHECKPOINTS_KEPT), *new)

    def after_train(self) -> None:
        """Waits until the last checkpoint is sent, also if training failed."""
        if self._sent:  # else an earlier hook failed before training
            self.after_step()
            self._wait()

    def _changed(self, name: str) -> int:
        path = self._folder / name
        return path.stat().st_mtime_ns if path.is_file() else 0

    def _wait(self) -> None:
        process, self._process = self._process, None
        if process and (reason := _finish(process)):
            self._sent = dict.fromkeys(self._sent, -1)
            logger.error(
                f"Cannot copy the checkpoint in '{self._folder}' to SOLVER.CHECKPOINT_URL "
                f"'{self._cfg.SOLVER.CHECKPOINT_URL}': {reason}"
            )


def _start(cfg: CfgNode, action: str, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, transfer.__file__, action, cfg.OUTPUT_DIR, cfg.SOLVER.CHECKPOINT_URL]
    return subprocess.Popen(
        [*command, *words], stdout=subprocess.PIPE, text=True,
        start_new_session=True,  # signals to the run do not reach it
    )  # fmt: skip


def _finish(process: subprocess.Popen[str]) -> str:
    """Waits for a transfer and returns its error message; "" if it succeeded."""
    said = process.communicate()[0].strip().splitlines()
    return (said[-1] if said else f"exit code {process.returncode}") if process.returncode else ""
