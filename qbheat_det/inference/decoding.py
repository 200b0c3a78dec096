# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Decodes images of strangers in processes that end after a number of seconds.

A decoder is a C library that Python cannot interrupt, and threads that run it block the exit of a
program. A process can be ended at any time, also if the library crashes or needs too much memory.
"""

import io
import math
import multiprocessing
import os
import queue
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np

from qbheat_det.data import IMAGE_FORMATS

from .images import Image, UnreadableImage, decode_image


@dataclass(frozen=True)
class DecodingLimits:
    """Limits of one image.

    Attributes:
        formats: Pillow's names of the allowed formats.
        max_pixels: largest number of pixels, by the header.
        seconds: longest time to decode an image.
    """

    formats: Sequence[str] = IMAGE_FORMATS
    max_pixels: float = math.inf
    seconds: float = 10.0


class DecodingProcesses:
    """A fixed number of processes that decode images. Threads can share them.

    A process that exceeds the time ends, and another one takes its place. The processes end with
    the program.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        # Forking this process would copy locks of its threads. The fork server has no threads, and
        # imports the decoders once for all processes.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__])
        self._idle: queue.SimpleQueue[tuple[Connection, BaseProcess]] = queue.SimpleQueue()
        for _ in range(count):
            self._idle.put(self._start())

    def decode(self, content: bytes | bytearray, name: str | Path, limits: DecodingLimits) -> Image:
        """Decodes the content of an image file to RGB (H, W, 3), uint8.

        Waits until a process is idle. ``name`` names the image in errors. Raises an
        ``UnreadableImage`` if the image is broken or exceeds a limit.
        """
        connection, process = self._idle.get()
        try:
            answer = _ask(connection, content, limits)
        except BaseException as error:
            process.join(1)  # the exit code of a process that ended
            exit_code = process.exitcode
            process.kill()
            connection.close()
            connection, process = self._start()
            if isinstance(error, EOFError | OSError):
                raise UnreadableImage(name, _explain(exit_code, limits)) from error
            raise
        finally:
            self._idle.put((connection, process))
        if isinstance(answer, str):
            raise UnreadableImage(name, answer)
        return answer

    def _start(self) -> tuple[Connection, BaseProcess]:
        here, there = self._context.Pipe()
        process = self._context.Process(
            target=_decode_all, args=(there,), name="decoder", daemon=True
        )
        process.start()
        there.close()  # so that the end of the process ends the pipe
        return here, process


def _explain(exit_code: int | None, limits: DecodingLimits) -> str:
    """Returns the reason why a decoding process ended."""
    if exit_code == -signal.SIGALRM:
        return f"decoding takes more than {limits.seconds:g} s"
    if exit_code == -signal.SIGKILL:
        return "the decoder was killed, perhaps for lack of memory"
    return "the decoder crashed"


def _ask(connection: Connection, content: bytes | bytearray, limits: DecodingLimits) -> Image | str:
    """Returns the decoded image, or the reason why it cannot be decoded."""
    connection.send(limits)
    connection.send_bytes(content)
    answer = connection.recv()
    if isinstance(answer, str):
        return answer
    image = np.empty(answer, np.uint8)
    connection.recv_bytes_into(image.data.cast("B"))
    return image


def count_decoders() -> int:
    """Returns a suitable number of decoding processes for this machine."""
    return max(2, min(4, os.cpu_count() or 1))


def _decode_all(connection: Connection) -> None:
    """Answers each content with a shape and pixels, or with the reason why it cannot be decoded."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the program, which ends this process
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # The alarm has no handler, so it ends this process even within a C library.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    while True:
        try:
            limits = connection.recv()
            content = connection.recv_bytes()
        except EOFError:  # the program ended
            return
        signal.setitimer(signal.ITIMER_REAL, limits.seconds)
        try:
            image = decode_image(
                io.BytesIO(content),
                "the image",
                formats=limits.formats,
                max_pixels=limits.max_pixels,
            )
        except UnreadableImage as error:
            connection.send(error.reason)
            continue
        except MemoryError:
            connection.send("there is not enough memory to decode it")
            continue
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        connection.send(image.shape)
        connection.send_bytes(np.ascontiguousarray(image).data.cast("B"))
