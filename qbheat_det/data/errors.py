# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What is wrong with a data set, one object for each error, and the message that stops a run."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from qbheat_det.core.errors import UserError
from qbheat_det.core.text import join_first


@dataclass(frozen=True)
class DataError:
    """One thing that stops training, or silently spoils it.

    Mappers return it in place of an image that cannot be read, which is then skipped.

    Attributes:
        kind: name of all errors of this sort, such as ``"box outside its image"``.
        where: file and id, such as ``"train.json: annotation id 7"``.
        reason: what is wrong, and what to do if that is not plain.
    """

    kind: str
    where: str
    reason: str

    @property
    def message(self) -> str:
        """Where and why, in one line."""
        return f"{self.where}: {self.reason}"


def raise_first(errors: Sequence[DataError]) -> None:
    """Does nothing if there are no errors.

    Raises:
        UserError: the first error's message, with the number of those like it and of others.
    """
    if not errors:
        return
    alike = sum(error.kind == errors[0].kind for error in errors) - 1
    others = len(errors) - alike - 1
    counts = [f"{alike} more like it"] if alike else []
    if others:
        counts.append(
            f"{others} other error{'s' * (others > 1)}; tools/inspect_dataset.py lists them all"
        )
    raise UserError(errors[0].message + (f" ({', '.join(counts)})" if counts else ""))


def join_messages(errors: Iterable[DataError], limit: int = 10) -> str:
    """Returns the first messages in one line, and how many more there are."""
    return join_first(map(printable, errors), limit, separator="; ")


def printable(error: DataError) -> str:
    """Returns the message; a file's name may be bytes that neither a log nor a file takes."""
    return error.message.encode(errors="backslashreplace").decode()
