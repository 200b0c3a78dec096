# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What is wrong with a data set, one object a fault, and the sentence that stops a run for it."""

from collections.abc import Sequence
from dataclasses import dataclass

from qbheat_det.core.errors import UserError


@dataclass(frozen=True)
class Fault:
    """One thing that stops training, or silently spoils it.

    Attributes:
        kind: what all faults of this sort are called, such as ``"box outside its image"``.
        where: file and id, such as ``"train.json: annotation id 7"``.
        reason: what is wrong, and what to do where that is not plain.
    """

    kind: str
    where: str
    reason: str

    @property
    def sentence(self) -> str:
        return f"{self.where}: {self.reason}"


def raise_first(faults: Sequence[Fault]) -> None:
    """Does nothing where there are no faults.

    Raises:
        UserError: the first fault's sentence, with the number of those like it and of others.
    """
    if not faults:
        return
    alike = sum(fault.kind == faults[0].kind for fault in faults) - 1
    others = len(faults) - alike - 1
    counts = [f"{alike} more like it"] if alike else []
    if others:
        counts.append(f"{others} other fault{'s' * (others > 1)}")
    hint = "; tools/inspect_dataset.py lists them all" if others else ""
    more = f" ({', '.join(counts)}{hint})" if counts else ""
    raise UserError(faults[0].sentence + more)
