# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Numbers on the command line: what is none, or out of range, is refused with a sentence."""

import argparse
import math
from collections.abc import Callable


def whole(*, least: int = 1, end: int | None = None) -> Callable[[str], int]:
    """Returns a type for ``add_argument``: whole numbers from ``least`` to below ``end``."""
    meant = f"from {least} to {end - 1}" if end is not None else f"of at least {least}"

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least or (end is not None and number >= end):
            raise argparse.ArgumentTypeError(f"a whole number {meant}, not '{text}'")
        return number

    return read


def real(*, highest: float, above: bool = False) -> Callable[[str], float]:
    """Returns a type for ``add_argument``: numbers from 0, or above it, to ``highest``."""

    def read(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not 0 <= number <= highest or (above and number == 0):  # and nan is in no range
            meant = f"above 0 and at most {highest:g}" if above else f"from 0 to {highest:g}"
            raise argparse.ArgumentTypeError(f"a number {meant}, not '{text}'")
        return number

    return read


def some_text(text: str) -> str:
    """A type for ``add_argument``: any words but none."""
    if not text.strip():
        raise argparse.ArgumentTypeError("a name, not ''")
    return text
