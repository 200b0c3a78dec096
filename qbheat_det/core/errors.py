# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The exception for errors that users can fix, and how command-line tools print it."""

import errno
import functools
import os
import sys
import traceback
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class UserError(Exception):
    """Bad input: the message is one sentence that names the file or key and says what to do.

    All other errors are defects of this package and keep their traceback.
    """


class Interrupted(KeyboardInterrupt):
    """A signal ended a run in order; ``code`` is the shell's exit code for that signal."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.code = 128 + number


def exit_on_user_error(main: Callable[P, R]) -> Callable[P, R]:
    """Decorates a tool's ``main``: a ``UserError`` becomes one line on stderr and exit code 2.

    So does a full disk. Ctrl-C gives exit code 130, and another signal 128 + its number. With
    ``QBHEAT_TRACEBACK=1`` in the environment, the traceback is printed too.
    """

    @functools.wraps(main)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return main(*args, **kwargs)
        except UserError as error:
            if os.environ.get("QBHEAT_TRACEBACK") == "1":
                traceback.print_exc()
            message = find_user_message(str(error)) or str(error)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            where = f" that holds '{error.filename}'" if error.filename else ""
            message = f"the disk{where} is full: free some space, or choose another folder"
        except KeyboardInterrupt as stop:
            print(str(stop) or "interrupted", file=sys.stderr)
            raise SystemExit(stop.code if isinstance(stop, Interrupted) else 130) from None
        print(f"error: {message}", file=sys.stderr)
        raise SystemExit(2)

    return wrapped


def find_user_message(text: str) -> str | None:
    """Returns the message of the ``UserError`` at the end of a printed traceback, if there is one.

    A data loader's worker and a spawned process pass on their errors as such a text.
    """
    _, marker, sentence = text.rpartition(f"{UserError.__module__}.{UserError.__name__}: ")
    # Otherwise the traceback ended with another error.
    return sentence.strip() if marker and "Traceback (most recent call" not in sentence else None


def is_lost_peer(error: BaseException | None) -> bool:
    """Returns whether an error of PyTorch says that another process cannot be reached."""
    return isinstance(error, RuntimeError) and (
        type(error).__module__.startswith("torch.distributed") or "gloo" in str(error)
    )
