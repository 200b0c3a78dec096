# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What a person can ask of every sight, and the shape of a sight."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qbheat_det.analysis.exhibit import Exhibit

from .subject import Subject


@dataclass(frozen=True)
class SightOptions:
    """
    Attributes:
        images: folder of pictures to look at; None for the run's own data.
        num_images: how many of them are drawn; sights that count may take more.
        seed: of what is random, such as controls.
        extra: values of the sight's own flags, by their names; empty in a test that wants the
            defaults, so read them with ``options.extra.get(name, default)``.
    """

    images: Path | None = None
    num_images: int = 6
    seed: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Sight:
    """One thing that can be seen of runs.

    Attributes:
        name: on the command line.
        summary: one line for ``--list``, without a full stop.
        see: makes the exhibit, of all subjects side by side; raises ``NothingToSee`` where there
            is nothing of the kind, ``UserError`` for a person's mistake.
        add_flags: adds the sight's own flags to a parser. Each has a default.
    """

    name: str
    summary: str
    see: Callable[[Sequence[Subject], SightOptions], Exhibit]
    add_flags: Callable[[argparse.ArgumentParser], None] | None = None

    def default_flags(self) -> dict[str, Any]:
        """Returns the sight's own flags as they are where none is given."""
        parser = argparse.ArgumentParser(add_help=False)
        if self.add_flags is not None:
            self.add_flags(parser)
        return vars(parser.parse_args([]))
