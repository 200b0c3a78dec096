# Copyright (c) qbheat_det contributors. Apache-2.0.
"""How to deploy: the arguments of ``deploy``, checked before anything is done."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qbheat_det.core.errors import UserError

from .precision import check_precision

COMPILE = ("auto", "off")
COMPILE_AFTER = 300
"""Images after which a size is compiled: a minute or two of compiling, gained by then or soon."""


def tell_on_stderr(line: str) -> None:
    """Prints a line where it does not mix with results."""
    print(line, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Settings:
    """See ``deploy``, whose arguments these are.

    Raises:
        UserError: one of them is none of those named there.
    """

    precision: str = "float32"
    compile: str = "auto"
    image_sizes: Sequence[Sequence[int]] = ()
    compile_after: int = COMPILE_AFTER
    keep_memory: bool = True
    cache_folder: str | Path | None = None
    tell: Callable[[str], None] = tell_on_stderr

    def __post_init__(self) -> None:
        check_precision(self.precision)
        if self.compile not in COMPILE:
            raise UserError(f"compile is one of {', '.join(COMPILE)}, not '{self.compile}'")
        _check_sizes(self.image_sizes)
        if not _is_count(self.compile_after):
            raise UserError(
                f"compile_after is a number of images, 0 for never, not {self.compile_after!r}"
            )
        if not isinstance(self.keep_memory, bool):
            raise UserError(f"keep_memory is True or False, not {self.keep_memory!r}")
        if self.cache_folder is not None and not (
            isinstance(self.cache_folder, str | Path) and str(self.cache_folder)
        ):
            raise UserError(f"cache_folder is the path of a folder, not {self.cache_folder!r}")
        if not callable(self.tell):
            raise UserError(f"tell takes a line of text, which {self.tell!r} does not")


def _check_sizes(sizes: Any) -> None:
    if not _is_list(sizes):
        raise UserError(f"image_sizes is a list of heights and widths in pixels, not {sizes!r}")
    for size in sizes:
        if not _is_list(size) or len(size) != 2 or not all(_is_count(x) and x > 0 for x in size):
            raise UserError(f"image_sizes are pairs of height and width in pixels, not {size!r}")


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
