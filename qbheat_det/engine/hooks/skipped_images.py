# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Images that were skipped because they cannot be read: counted and named, never fatal."""

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from detectron2.engine import HookBase
from detectron2.utils import comm

from qbheat_det.core.files import write_atomically
from qbheat_det.data import DataError, join_messages

from .training_run import TrainingRun, is_due

logger = logging.getLogger(__name__)
SKIPPED_FILE = "skipped_images.txt"


class SkippedImages(HookBase):
    """Collects the images that the streams of all processes skipped, and why.

    The log names new ones once a period and all at the end; ``OUTPUT_DIR/skipped_images.txt`` lists
    them. It comes before the hook that saves, so that a resumed run knows of those before.
    """

    trainer: TrainingRun

    def __init__(self, *, period: int) -> None:
        """``period`` counts iterations between two exchanges of the processes; 0 is the end."""
        self._period = period
        self.errors: dict[str, DataError] = {}
        """By the image, the same on all processes."""

    def state_dict(self) -> dict[str, Any]:
        return {"errors": [[error.kind, error.where, error.reason] for error in self._sorted()]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._add(DataError(*words) for words in state_dict["errors"])

    def after_step(self) -> None:
        """Exchanges and names new images at the end of a period."""
        if not is_due(self.trainer, self._period):
            return
        known = set(self.errors)
        for met in comm.all_gather(list(self.trainer.data_loader.skipped.values())):
            self._add(met)
        new = [error for error in self._sorted() if error.where not in known]
        if new and comm.is_main_process():
            logger.warning(f"Skipped, with another image in its place: {join_messages(new)}")
            text = "".join(f"{error.message}\n" for error in self._sorted())
            path = Path(self.trainer.cfg.OUTPUT_DIR) / SKIPPED_FILE
            write_atomically(path, lambda stream: stream.write(text.encode()))

    def after_train(self) -> None:
        """Counts and names them all, also if the run ends with an error."""
        if self.errors and comm.is_main_process():
            images = self.trainer.data_loader.num_images
            logger.warning(
                f"{len(self.errors):,} of {images:,} images were skipped: "
                f"{join_messages(self._sorted())} (all are in {SKIPPED_FILE})"
            )

    def _add(self, errors: Iterable[DataError]) -> None:
        self.errors.update({error.where: error for error in errors})

    def _sorted(self) -> list[DataError]:
        return sorted(self.errors.values(), key=lambda error: error.where)
