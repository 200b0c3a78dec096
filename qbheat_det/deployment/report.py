# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The report of ``deploy``: each step, and whether it applied."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """One step: its name, whether it applied, and what it did or why it did not apply."""

    name: str
    applied: bool
    detail: str

    def __str__(self) -> str:
        return f"{self.name:<14}{'yes' if self.applied else 'no':<5}{self.detail}"


class DeployReport(dict[str, Step]):
    """The steps by name, in their order; printed one a line."""

    def add(self, name: str, applied: bool, detail: str) -> None:
        """Adds a step.

        Args:
            name: "fold", "fuse", "channels-last", "memory", "precision", "compile" or
                "CUDA graphs".
            applied: whether the model changed.
            detail: what was done, or why not.
        """
        self[name] = Step(name, applied, detail)

    def __str__(self) -> str:
        return "\n".join(map(str, self.values()))
