# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The exceptions for errors that users can fix, and how command-line tools print them."""

import contextlib
import errno
import functools
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

from .termination import Interrupted, end_process, ends_on_sigterm
from .text import escape_controls, one_line

P = ParamSpec("P")
R = TypeVar("R")
# Errors of connections in httpx, requests and urllib, which have no common base.
_NETWORK_ERRORS = frozenset(
    {
        *("ConnectError", "ConnectTimeout", "ReadTimeout", "ProxyError", "ConnectionError"),
        *("SSLError", "URLError"),
    }
)
_EXIT_OF_LOST_READER = 128 + 13  # SIGPIPE, which Windows does not have


class UserError(Exception):
    """An error that the user can fix, such as bad input.

    The message is one sentence that names the file or key, and explains what to do. All other
    exceptions are bugs of this package, and are shown with their traceback.
    """


def describe_download_error(error: BaseException) -> str:
    """Returns why a download failed, in one line. First of all says if there is no network.

    Libraries explain at length what they could not find, and hide an error of the connection, which
    has caused it, behind the error that they raise.
    """
    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in causes:
        causes.append(cause)
        cause = cause.__cause__ or cause.__context__
    for cause in causes:
        is_network = isinstance(cause, ConnectionError | TimeoutError | socket.gaierror)
        if is_network or type(cause).__name__ in _NETWORK_ERRORS:
            return f"the network cannot be reached ({one_line(causes[-1])})"
    return one_line(error)


@contextlib.contextmanager
def refuse_unreadable(where: object) -> Iterator[None]:
    """Context for code that reads a file of unknown origin: every error becomes a ``UserError``.

    Crafted and damaged files raise errors of any type, so no list of types is complete. ``where``
    is the file or folder, for the message.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"'{where}' cannot be read: {type(error).__name__}: {one_line(error)} "
            "(QBHEAT_TRACEBACK=1 shows where)"
        ) from error


def exit_on_user_error(main: Callable[P, R]) -> Callable[P, R]:
    """Decorates the ``main`` function of a tool to print errors without a traceback.

    For a ``UserError`` or a full disk, the tool prints one line and exits with code 2. After a
    signal, it exits with 128 plus the signal's number (130 for Ctrl-C), after SIGTERM in at most
    ``GRACE_SECONDS``. If nobody reads its output any more, as in ``qbheat … | head``, it exits with
    141, like other programs. Other exceptions are not caught. If the environment has
    ``QBHEAT_TRACEBACK=1``, the traceback of a ``UserError`` is printed too.
    """

    @functools.wraps(main)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        open_closed_streams()
        try:
            with ends_on_sigterm():
                result = main(*args, **kwargs)
                sys.stdout.flush()
                return result
        except UserError as error:
            if os.environ.get("QBHEAT_TRACEBACK") == "1":
                traceback.print_exc()
            message = find_user_message(str(error)) or str(error)
        except OSError as error:
            if isinstance(error, BrokenPipeError) and has_lost_reader():
                end_process(_EXIT_OF_LOST_READER)
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            disk = "the disk"
            if error.filename:
                disk = f"the disk that holds '{error.filename}'"
            message = f"{disk} is full: free some space, or choose another folder"
        except Interrupted as stop:
            print(str(stop) or "interrupted", file=sys.stderr)
            if stop.number == signal.SIGTERM:
                end_process(stop.code)
            raise SystemExit(stop.code) from None
        except KeyboardInterrupt as stop:
            print(str(stop) or "interrupted", file=sys.stderr)
            raise SystemExit(128 + signal.SIGINT) from None
        print(f"error: {escape_controls(message)}", file=sys.stderr)
        raise SystemExit(2)

    return wrapped


def open_closed_streams() -> None:
    """Opens /dev/null for stdin, stdout and stderr that the caller has closed (``2>&-``).

    Otherwise, the next file would get the number of the stream, and messages of libraries would be
    written into it.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  open until the process ends
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def has_lost_reader() -> bool:
    """Returns whether stdout or stderr is a pipe that nobody reads any more."""
    if not hasattr(select, "poll"):  # on Windows
        return True
    streams = select.poll()
    streams.register(1, 0)
    streams.register(2, 0)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in streams.poll(0))


def find_user_message(text: str) -> str | None:
    """Returns the message of the ``UserError`` that ends a printed traceback, or None.

    Workers of data loaders and other processes send their errors to the main process in this form.
    """
    _, marker, message = text.rpartition(f"{UserError.__module__}.{UserError.__name__}: ")
    # If another traceback follows, the text ends with a different error.
    if not marker or "Traceback (most recent call" in message:
        return None
    return message.strip()


def is_lost_peer(error: BaseException | None) -> bool:
    """Returns whether an error of PyTorch means that another process cannot be reached."""
    if not isinstance(error, RuntimeError):
        return False
    return type(error).__module__.startswith("torch.distributed") or "gloo" in str(error)
