# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Runs single steps of the package's trainer."""

import itertools
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.utils.events import EventStorage

from benchmarks.timing import Clock


class Steps:
    """Runs one step of a trainer per call; builds the feature cache first if there is one.

    Attributes:
        trainer: the trainer.
        batches: the batches that it reads.
    """

    def __init__(self, cfg: CfgNode, clock: Clock, *, repeat: bool = False) -> None:
        """With ``repeat``, all steps get the first batch."""
        from qbheat_det.engine import Trainer

        Path(cfg.OUTPUT_DIR).mkdir(parents=True)  # logs are written, as in any run
        torch.manual_seed(0)  # all trainers of a case begin with the same weights
        self.trainer: Any = Trainer(cfg)
        if self.trainer.cached_features:
            self.trainer.cached_features.prepare(self.trainer.data_loader)
        if self.trainer.targets:
            self.trainer.targets.prepare(self.trainer.data_loader)
        self.batches: Iterator[Any] = iter(self.trainer.data_loader)
        if repeat:
            batch = next(self.batches)
            self.close()
            self.batches = itertools.repeat(batch)
        self._images = _TimedIterator(self.batches, clock)
        inner = self.trainer._trainer
        inner.model.train()
        for name in ("_data_loader_iter_obj", "_data_loader_iter"):  # main's, then v0.6's
            try:
                setattr(inner, name, self._images)
            except AttributeError:  # a property on main
                continue
        self.trainer.storage = EventStorage()
        with self.trainer.storage:
            for hook in self.trainer._hooks:
                hook.before_train()

    def close(self) -> None:
        """Ends the workers, which would otherwise keep this process from ending."""
        if isinstance(self.batches, Generator):
            self.batches.close()

    def __call__(self) -> tuple[float, float]:
        """Runs a step; returns the seconds that it waited for images, and its total loss."""
        with self.trainer.storage as storage:
            self.trainer.before_step()
            self.trainer.run_step()
            self.trainer.after_step()
            self.trainer.iter += 1
            return self._images.seconds, storage.history("total_loss").latest()


class _TimedIterator:
    """Passes batches on, and stores the seconds that loading the last batch took."""

    def __init__(self, batches: Iterator[Any], clock: Clock) -> None:
        self._batches = batches
        self._clock = clock
        self.seconds = 0.0

    def __iter__(self) -> "_TimedIterator":
        return self

    def __next__(self) -> Any:
        start = self._clock()
        batch = next(self._batches)
        self.seconds = self._clock() - start
        return batch
