# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The review of suspicious labels in the page: a person accepts or skips each correction."""

import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import PIL.Image

from qbheat_det.core.errors import UserError
from qbheat_det.core.files import write_atomically
from qbheat_det.labelling import SUSPECT_FILES, SuspectFile, draw_suspect, read_suspects

_SIDE = 800  # pixels of a crop


@dataclass(frozen=True)
class LabelReview:
    """The state of a review: the suspects, the decisions, and which suspect is shown.

    ``decisions`` tells by the index of a suspect whether its correction is accepted (True) or
    skipped (False). ``position`` is the index of the current suspect.
    """

    file: SuspectFile
    decisions: dict[int, bool] = field(default_factory=dict)
    position: int = 0

    @classmethod
    def open(cls, folder: str, offered: Sequence[str]) -> "LabelReview":
        """Starts a review of the suspects in an output folder of ``qbheat inspect --labels``.

        Raises:
            UserError: ``folder`` is not one of the folders ``offered``, or its ``suspects.json`` is
                invalid or does not name the folder of the images.
        """
        if folder not in offered:
            raise UserError(f"'{folder}' is not offered: start the app with --suspects {folder}")
        path = Path(folder, SUSPECT_FILES[0])
        file = read_suspects(path)
        if not file.image_root:
            raise UserError(f"'{path}' does not name the folder of its images: inspect again")
        return cls(file)

    @property
    def is_done(self) -> bool:
        """Whether all suspects were accepted or skipped."""
        return self.position >= len(self.file.suspects)

    def accept(self) -> "LabelReview":
        """Accepts the correction of the current suspect. Raises ``UserError`` if there is none."""
        return self._decide(True)

    def skip(self) -> "LabelReview":
        """Keeps the label of the current suspect. Raises ``UserError`` if there is none."""
        return self._decide(False)

    def back(self) -> "LabelReview":
        """Returns to the suspect before, whose decision can be changed."""
        return replace(self, position=max(0, self.position - 1))

    def _decide(self, is_accepted: bool) -> "LabelReview":
        if self.is_done:
            raise UserError("all labels are accepted or skipped")
        decisions = {**self.decisions, self.position: is_accepted}
        return replace(self, decisions=decisions, position=self.position + 1)

    def describe(self) -> str:
        """Returns the progress, and what is wrong with the current label."""
        num_accepted = sum(self.decisions.values())
        text = f"{num_accepted} accepted, {len(self.decisions) - num_accepted} skipped, "
        text += f"{len(self.file.suspects)} labels to check"
        if self.is_done:
            return f"{text}."
        suspect = self.file.suspects[self.position]
        name = Path(suspect.file_name).name
        return f"{text}\n\n{suspect.text}: {suspect.score:.2f}. {suspect.action}. `{name}`"

    def draw(self) -> PIL.Image.Image | None:
        """Draws the current suspect like ``suspects.html``. Returns None if there is none.

        Raises a ``UserError`` if the image cannot be read.
        """
        if self.is_done:
            return None
        suspect = self.file.suspects[self.position]
        path = os.path.join(self.file.image_root, suspect.file_name)
        try:
            return draw_suspect(path, suspect, side=_SIDE)
        except OSError as error:
            raise UserError(f"'{path}' cannot be read: {error}") from error

    def write(self, parent: Path) -> str:
        """Writes ``corrections.json`` with the accepted corrections, like ``suspects.html`` does.

        Returns its path, in a new folder in ``parent``. Raises ``UserError`` if no correction is
        accepted.
        """
        accepted = []
        for index, suspect in enumerate(self.file.suspects):
            if self.decisions.get(index):
                accepted.append(asdict(suspect))
        if not accepted:
            raise UserError("accept a correction first")
        path = Path(tempfile.mkdtemp(dir=parent), "corrections.json")
        content = {"data": self.file.digest, "suspects": accepted}
        write_atomically(path, json.dumps(content).encode())
        return str(path)
