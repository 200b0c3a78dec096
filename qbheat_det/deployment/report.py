# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What was done to a model for deployment, step by step, and what was not and why."""

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Step:
    """One step: its name, whether it applied, and a sentence of what it did or why it did not."""

    name: str
    applied: bool
    sentence: str

    def __str__(self) -> str:
        return f"{self.name:<14}{'yes' if self.applied else 'no':<5}{self.sentence}"


@dataclass
class DeployReport:
    """The steps of ``deploy``, in their order; printed, a line each."""

    steps: list[Step] = field(default_factory=list)

    def add(self, name: str, applied: bool, sentence: str) -> None:
        """Appends a step."""
        self.steps.append(Step(name, applied, sentence))

    def __getitem__(self, name: str) -> Step:
        """Returns the first step of a name; "program" may come several times.

        Raises:
            KeyError: there is none.
        """
        for step in self.steps:
            if step.name == name:
                return step
        raise KeyError(name)

    def __iter__(self) -> Iterator[Step]:
        return iter(self.steps)

    def __str__(self) -> str:
        return "\n".join(map(str, self.steps))
