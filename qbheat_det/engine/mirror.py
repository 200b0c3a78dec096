# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Copies a run to ``SOLVER.CHECKPOINT_URL``, from where any machine can resume it."""

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
    *("config.yaml", "run.json", "split.json", "metrics.json", "wandb_run_id.txt", SKIPPED_FILE),
    *("model_best.safetensors", "model_final.safetensors"),
)
_TAG = "last_checkpoint"


def fetch_run(cfg: CfgNode) -> None:
    """Fetches the last checkpoint at ``SOLVER.CHECKPOINT_URL`` to ``OUTPUT_DIR``.

    Raises:
        UserError: the URL cannot be read.
    """
    if reason := _finish(_start(cfg, "fetch", *_FILES)):
        raise UserError(f"SOLVER.CHECKPOINT_URL '{cfg.SOLVER.CHECKPOINT_URL}': {reason}")


class Mirror(HookBase):
    """Sends each new checkpoint and the run's other files, in the background."""

    trainer: TrainingRun

    def __init__(self, cfg: CfgNode) -> None:
        self._cfg, self._folder = cfg, Path(cfg.OUTPUT_DIR)
        self._process: subprocess.Popen[str] | None = None
        self._sent: dict[str, int] = {}  # modification time by file name

    def before_train(self) -> None:
        """Sends the config, to detect early that the URL is not writable.

        Raises:
            UserError: it is not.
        """
        tag = self._folder / _TAG
        self._sent[_TAG] = tag.stat().st_mtime_ns if tag.is_file() else 0
        self._send(tag=False)
        if reason := self._wait():
            raise UserError(f"SOLVER.CHECKPOINT_URL '{self._cfg.SOLVER.CHECKPOINT_URL}': {reason}")

    def after_step(self) -> None:
        """Starts to send a new checkpoint, after waiting for the previous transfer."""
        tag = self._folder / _TAG
        if tag.is_file() and tag.stat().st_mtime_ns != self._sent[_TAG]:
            self._complain(self._wait())
            self._send(tag=True)

    def after_train(self) -> None:
        """Waits until the last checkpoint is sent, after an error as well."""
        if _TAG in self._sent:
            self.after_step()
            self._complain(self._wait())

    def _send(self, *, tag: bool) -> None:
        names = list(_FILES)
        if tag:
            names += [(self._folder / _TAG).read_text(encoding="utf-8").strip(), _TAG]
        paths = (self._folder / name for name in names)
        times = {path.name: path.stat().st_mtime_ns for path in paths if path.is_file()}
        new = [name for name, changed in times.items() if self._sent.get(name) != changed]
        self._sent.update(times if tag else {name: times[name] for name in new})
        self._process = _start(self._cfg, "send", str(self._cfg.SOLVER.CHECKPOINTS_KEPT), *new)

    def _wait(self) -> str:
        process, self._process = self._process, None
        return _finish(process) if process else ""

    def _complain(self, reason: str) -> None:
        if reason:
            self._sent = dict.fromkeys(self._sent, 0)  # sends every file again
            logger.error(
                f"Cannot copy the checkpoint in '{self._folder}' to SOLVER.CHECKPOINT_URL "
                f"'{self._cfg.SOLVER.CHECKPOINT_URL}': {reason}"
            )


def _start(cfg: CfgNode, action: str, *words: str) -> subprocess.Popen[str]:
    seconds = str(cfg.DATALOADER.RETRY_SECONDS)
    command = [sys.executable, transfer.__file__, seconds, action, cfg.OUTPUT_DIR]
    return subprocess.Popen(
        [*command, cfg.SOLVER.CHECKPOINT_URL, *words], stdout=subprocess.PIPE, text=True,
        start_new_session=True,  # signals to the run do not reach it
    )  # fmt: skip


def _finish(process: subprocess.Popen[str]) -> str:
    """Returns the error of a transfer; "" if it succeeded."""
    said = process.communicate()[0].strip().splitlines()
    return (said[-1] if said else f"exit code {process.returncode}") if process.returncode else ""
