# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The loop over subjects that sights share: a faulty one costs itself alone, and is said."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from qbheat_det.core.errors import UserError

from .refusal import NothingToSee
from .subject import Kind, Subject

logger = logging.getLogger(__name__)

Found = TypeVar("Found")

_KINDS: dict[str, str] = {
    "pretraining": "pre-training",
    "detector": "detection",
    "classifier": "classification",
}


class FaultOfAll(UserError):
    """A mistake that is no single subject's, such as in a flag: it ends the sight."""


@dataclass(frozen=True)
class SideBySide(Generic[Found]):
    """What was found of several subjects.

    Attributes:
        found: by label, in the order of the subjects; one or more.
        left_out: a sentence for each of the others.
    """

    found: dict[str, Found]
    left_out: list[str]

    def explain(self) -> list[str]:
        """Returns the paragraph that names what was left out, if anything was."""
        return [f"Left out: {'; '.join(self.left_out)}."] if self.left_out else []


def look_at_each(
    subjects: Sequence[Subject],
    look: Callable[[Subject], Found],
    *,
    nothing: str,
    needs_weights: bool = True,
) -> SideBySide[Found]:
    """Looks at one subject after another, and leaves out those that cannot be looked at.

    Args:
        subjects: with labels that differ.
        look: raises ``NothingToSee`` or ``UserError`` with a sentence that says why.
        nothing: begins the sentence if no subject is left, such as "no reconstructions".
        needs_weights: leave out, with one and the same reason everywhere, what has none.

    Raises:
        NothingToSee: all were left out, and nothing is wrong with any.
        UserError: all were left out, and something is wrong with one; or a ``FaultOfAll``.
    """
    found: dict[str, Found] = {}
    left_out: list[str] = []
    faults: list[str] = []
    for subject in subjects:
        try:
            if needs_weights:
                _ = subject.weights  # raises where there are none
            found[subject.label] = look(subject)
        except NothingToSee as reason:
            left_out.append(str(reason))
        except FaultOfAll:
            raise
        except UserError as fault:
            sentence = str(fault)
            label = f"'{subject.label}'"
            left_out.append(sentence if label in sentence else f"{label}: {sentence}")
            faults.append(left_out[-1])
    left_out = list(dict.fromkeys(left_out))
    if found:
        for sentence in faults:  # what is merely not there is no warning
            logger.warning("left out: %s", sentence)
        return SideBySide(found, left_out)
    sentence = f"{nothing}: {'; '.join(left_out)}"
    raise UserError(sentence) if faults else NothingToSee(sentence)


def require_kind(subject: Subject, kind: Kind, otherwise: str) -> None:
    """
    Args:
        subject: to be looked at.
        kind: what it must be for.
        otherwise: goes on after the label of a subject of another kind.

    Raises:
        NothingToSee: it is of another kind.
        UserError: its config is not sound.
    """
    if subject.kind != kind:
        name = _KINDS.get(subject.kind, subject.kind)
        raise NothingToSee(f"'{subject.label}' ({name}) {otherwise}")
