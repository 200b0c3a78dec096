# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Images that were left out because they cannot be read: counted and named, never fatal."""

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from detectron2.engine import HookBase
from detectron2.utils import comm

from qbheat_det.core.files import write_atomically
from qbheat_det.data import Fault

if TYPE_CHECKING:
    from .trainer import Trainer

logger = logging.getLogger(__name__)
FAULTS_FILE = "broken_images.txt"
_NAMED = 10  # in a line of the log


class BrokenImages(HookBase):
    """Gathers, over all processes, what is wrong with the images that the stream left out.

    New ones are named in the log in its period; all of them at the end of the run, and in
    ``OUTPUT_DIR/broken_images.txt``. It stands before the hook that saves, so that a resumed run
    still knows of those before.
    """

    trainer: "Trainer"

    def __init__(self, *, period: int) -> None:
        """
        Args:
            period: iterations between two exchanges of the processes; 0 for the end only.
        """
        self._period = period
        self.faults: dict[str, Fault] = {}
        """By the image, the same on all processes."""

    def state_dict(self) -> dict[str, Any]:
        """The images known so far."""
        return {"faults": [[fault.kind, fault.where, fault.reason] for fault in self._sorted()]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes up what ``state_dict`` gave."""
        self._add(Fault(*words) for words in state_dict["faults"])

    def after_step(self) -> None:
        """Exchanges and names new images where it is time to."""
        done = self.trainer.iter + 1
        if done < self.trainer.max_iter and not (self._period and done % self._period == 0):
            return
        known = set(self.faults)
        for met in comm.all_gather(list(self.trainer.data_loader.faults.values())):
            self._add(met)
        new = [fault for fault in self._sorted() if fault.where not in known]
        if new and comm.is_main_process():
            logger.warning(f"Left out, with another image in its place: {name_faults(new)}")
            self._write()

    def after_train(self) -> None:
        """Counts and names them all; also where the run ends with an error."""
        if self.faults and comm.is_main_process():
            images = self.trainer.data_loader.num_images
            logger.warning(
                f"{len(self.faults):,} of {images:,} images were left out: "
                f"{name_faults(self._sorted())}. {FAULTS_FILE} in OUTPUT_DIR lists them all."
            )

    def _add(self, faults: Iterable[Fault]) -> None:
        self.faults.update({fault.where: fault for fault in faults})

    def _sorted(self) -> list[Fault]:
        return sorted(self.faults.values(), key=lambda fault: fault.where)

    def _write(self) -> None:
        text = "".join(f"{_printable(fault)}\n" for fault in self._sorted())
        path = Path(self.trainer.cfg.OUTPUT_DIR) / FAULTS_FILE
        write_atomically(path, lambda stream: stream.write(text.encode()))


def name_faults(faults: list[Fault]) -> str:
    """Returns the first few of them in one line, and how many there are besides."""
    more = f"; and {len(faults) - _NAMED:,} more" if len(faults) > _NAMED else ""
    return "; ".join(_printable(fault) for fault in faults[:_NAMED]) + more


def _printable(fault: Fault) -> str:
    """A file's name may be bytes that are no text, which neither a log nor a file takes."""
    return fault.sentence.encode(errors="backslashreplace").decode()
