# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The one exception that people see, and how command-line tools print it."""

import errno
import functools
import os
import sys
import traceback
from collections.abc import Callable
from typing import ParamSpec, TypeVar

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
P = ParamSpec("P")
R = TypeVar("R")


class UserError(Exception):
    """Bad input from a person: one sentence that names the file or key and what to do.

    Everything that is not a ``UserError`` is a defect of this package and keeps its traceback.
    """


class Interrupted(KeyboardInterrupt):
    """A signal ended a run in order; ``code`` is the shell's exit code for that signal."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.code = 128 + number


def exit_on_user_error(main: Callable[P, R]) -> Callable[P, R]:
    """Decorates a tool's ``main``: a ``UserError`` becomes one line on stderr and exit code 2.

    So does a full disk, wherever it is met; Ctrl-C ends with code 130, another signal that a run
    heeds with 128 and its number.

    With ``QBHEAT_TRACEBACK=1`` in the environment the traceback is printed too.
    """

    @functools.wraps(main)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return main(*args, **kwargs)
        except UserError as error:
            if os.environ.get("QBHEAT_TRACEBACK") == "1":
                traceback.print_exc()
            print(f"error: {find_user_message(str(error)) or error}", file=sys.stderr)
            raise SystemExit(2) from None
        except OSError as error:
            if error.errno not in _DISK_FULL:
                raise
            where = f" that holds '{error.filename}'" if error.filename else ""
            print(
                f"error: the disk{where} is full: free some space, or choose another folder",
                file=sys.stderr,
            )
            raise SystemExit(2) from None
        except KeyboardInterrupt as stop:
            print(str(stop) or "interrupted", file=sys.stderr)
            raise SystemExit(getattr(stop, "code", 130)) from None

    return wrapped


def find_user_message(text: str) -> str | None:
    """Returns the sentence of the ``UserError`` that ended a printed traceback, if one did.

    Errors of a data loader's worker and of a spawned process arrive as such a text.
    """
    _, marker, sentence = text.rpartition(f"{UserError.__module__}.{UserError.__name__}: ")
    # A traceback that goes on after it ended with another error.
    return sentence.strip() if marker and "Traceback (most recent call" not in sentence else None


def is_lost_peer(error: BaseException | None) -> bool:
    """Returns whether an error of PyTorch says that another process cannot be reached."""
    return isinstance(error, RuntimeError) and (
        type(error).__module__.startswith("torch.distributed") or "gloo" in str(error)
    )
