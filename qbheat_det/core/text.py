# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Formats durations, sizes, long lists and errors as text."""

import re
from collections.abc import Iterable

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def format_duration(seconds: float) -> str:
    """Returns ``"2 d 3 h"``, ``"1 h 05 min"``, ``"3 min 10 s"``, ``"4.2 s"`` or ``"120 ms"``."""
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    if hours < 48:
        return f"{hours} h {minutes:02d} min"
    days, hours = divmod(round(seconds / 3600), 24)
    return f"{days} d {hours} h"


def format_bytes(count: float) -> str:
    """Returns ``"512 B"``, ``"3.4 MiB"`` and so on, in powers of 1024."""
    if abs(count) < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        count /= 1024
        if abs(count) < 1024:
            return f"{count:.1f} {unit}"
    return f"{count / 1024:.1f} TiB"


def join_first(items: Iterable[object], limit: int = 3, separator: str = ", ") -> str:
    """Joins the first ``limit`` items and counts the rest, as in ``"a, b, c and 5 more"``."""
    texts = [str(item) for item in items]
    first = separator.join(texts[:limit])
    if len(texts) <= limit:
        return first
    return f"{first} and {len(texts) - limit:,} more"


def escape_controls(text: str) -> str:
    """Replaces control characters by escapes such as ``\\x1b``, except line breaks and tabs.

    Names in foreign files could otherwise clear a terminal, or change its title.
    """
    return _CONTROLS.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def one_line(error: BaseException) -> str:
    """Returns an error's message in at most 200 characters without line breaks.

    Returns the name of the error's type if the message is empty.
    """
    return " ".join(str(error).split())[:200] or type(error).__name__
