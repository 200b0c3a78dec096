# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Ends a process soon after SIGTERM, whatever it does.

Docker kills a process ten seconds after SIGTERM, and batch systems soon after. Python calls a
signal handler only between two instructions, so it waits for a long computation, a collective
operation of several processes, or a slow disk. Here, a thread measures the time.
"""

import contextlib
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

GRACE_SECONDS = 9.0
"""Longest time from SIGTERM to the end of the process."""
_TOO_LATE = b"\nstopped by SIGTERM in the middle of a long operation; complete files are kept\n"


class Interrupted(KeyboardInterrupt):
    """A run was ended by a signal.

    Attributes:
        number: number of the signal.
        code: exit code of the process, which is 128 plus the number.
    """

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.number = number
        self.code = 128 + number


@contextlib.contextmanager
def ends_on_sigterm() -> Iterator[None]:
    """Context in which SIGTERM raises ``Interrupted``, for the work of a command.

    ``GRACE_SECONDS`` after the signal, the process ends even if the exception was not raised yet,
    or if a handler that the work installs goes on for longer. Has no effect if SIGTERM is ignored
    or has a handler, or outside the main thread.
    """
    is_main_thread = threading.current_thread() is threading.main_thread()
    if not is_main_thread or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    threading.Thread(
        target=_end_after_sigterm, args=(receiver,), name="termination", daemon=True
    ).start()
    # The system's handler writes the number of each signal at once, before any Python code runs.
    previous = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, _raise_interrupted)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is _raise_interrupted:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.set_wakeup_fd(previous)
        sender.close()


def _raise_interrupted(number: int, frame: FrameType | None) -> None:
    raise Interrupted(number, "stopped by SIGTERM")


def _end_after_sigterm(receiver: socket.socket) -> None:
    """Ends the process some time after SIGTERM. Returns if the context ends without the signal."""
    with receiver:
        numbers = b""
        while signal.SIGTERM not in numbers:
            numbers = receiver.recv(64)
            if not numbers:
                return
        time.sleep(GRACE_SECONDS)
    os.write(2, _TOO_LATE)  # to stderr
    end_process(128 + signal.SIGTERM)


def end_process(code: int) -> NoReturn:
    """Ends the process and its children at once.

    The usual exit waits for threads, and frees all objects, which takes seconds on a busy machine.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed, or nobody reads
            stream.flush()
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(code)


def _forget_in_child() -> None:
    """Restores the default in a forked process, whose signals are none of its parent's."""
    if signal.getsignal(signal.SIGTERM) is _raise_interrupted:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


os.register_at_fork(after_in_child=_forget_in_child)
