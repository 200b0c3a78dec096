# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Decodes images of strangers in processes that end after a number of seconds.

A decoder is a C library that Python cannot interrupt, and threads that run it block the exit of a
program. A process can be ended at any time, also if the library crashes or needs too much memory.
"""

import contextlib
import io
import multiprocessing
import os
import queue
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkContext, ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import PIL.Image

from qbheat_det.core.errors import UserError
from qbheat_det.core.image_files import IMAGE_FORMATS, open_in_format, turn_upright

from .images import (
    Image,
    UnreadableImage,
    check_pixels,
    decode_image,
    open_file,
    open_frames,
)

T = TypeVar("T")


@dataclass(frozen=True)
class DecodingLimits:
    """Limits of one image, or of each frame of a video.

    Attributes:
        formats: Pillow's names of the allowed formats of images.
        max_pixels: largest number of pixels, by the header. The default is about Pillow's.
        seconds: longest time to decode an image or a frame.
    """

    formats: Sequence[str] = IMAGE_FORMATS
    max_pixels: float = 179e6
    seconds: float = 10.0


@dataclass(frozen=True)
class _Request:
    """What a process shall decode. The content of an image follows if there is no path."""

    kind: Literal["image", "check", "video"]
    path: Path | None
    limits: DecodingLimits


class DecodingProcesses:
    """A fixed number of processes that decode images and videos. Threads can share them.

    A process that exceeds the time ends, and another one takes its place. The processes end with
    the program, or with the context.
    """

    def __init__(self, count: int, *, fork: bool = False) -> None:
        """
        Args:
            count: number of processes.
            fork: start them at once, for programs without threads of their own. A process that is
                forked from a program with threads may wait for a lock that no thread releases.

        Raises:
            UserError: the program's script starts processes whenever it is imported.
        """
        end_if_imported_by_child()
        self.count = count
        if fork:
            self._context: ForkContext | ForkServerContext = multiprocessing.get_context("fork")
        else:
            # The fork server has no threads, and imports the decoders once for all processes.
            self._context = multiprocessing.get_context("forkserver")
            self._context.set_forkserver_preload([__name__])
        self._idle: queue.SimpleQueue[tuple[Connection, BaseProcess]] = queue.SimpleQueue()
        for _ in range(count):
            self._idle.put(self._start())
        if not fork:
            self._check_start()

    def _check_start(self) -> None:
        """Raises a ``UserError`` if a process ends at its start.

        Each process imports the program's script, and would run it if it has no ``__main__`` block.
        """
        try:
            for _ in range(self.count):
                self.check(Path(os.devnull), DecodingLimits())
        except UnreadableImage as error:
            self.__exit__()
            raise UserError(
                "the processes that decode images end at their start: a script that starts the "
                "server or the app must do so inside 'if __name__ == \"__main__\":'"
            ) from error

    def __enter__(self) -> "DecodingProcesses":
        return self

    def __exit__(self, *_: object) -> None:
        while not self._idle.empty():
            connection, process = self._idle.get()
            process.kill()
            connection.close()

    def decode(
        self, source: bytes | bytearray | Path, name: str | Path, limits: DecodingLimits
    ) -> Image:
        """Decodes an image file, or the content of one, to RGB (H, W, 3), uint8.

        Waits until a process is idle. ``name`` names the image in errors. Raises an
        ``UnreadableImage`` if the image is broken or exceeds a limit.
        """
        path = source if isinstance(source, Path) else None
        with self._borrow(name, limits) as connection:
            connection.send(_Request("image", path, limits))
            if not isinstance(source, Path):
                connection.send_bytes(source)
            (image,) = _receive(connection, name)
        return image

    def check(self, path: Path, limits: DecodingLimits) -> None:
        """Raises an ``UnreadableImage`` if an image file exceeds a limit. Passes broken images."""
        with self._borrow(path, limits) as connection:
            connection.send(_Request("check", path, limits))
            list(_receive(connection, path))

    def open_video(
        self, path: Path, limits: DecodingLimits
    ) -> tuple[Iterator[Image], float, int | None]:
        """Opens a video. Returns the same as ``open_frames``, with the images alone.

        The iterator raises an ``UnreadableImage`` if a frame exceeds a limit.
        """
        answers = self._decode_video(path, limits)
        fps, num_frames = next(answers)
        return answers, fps, num_frames

    def _decode_video(self, path: Path, limits: DecodingLimits) -> Iterator[Any]:
        """Yields the frame rate and the number of frames, and then the frames."""
        num_read = 0
        try:
            with self._borrow(path, limits) as connection:
                connection.send(_Request("video", path, limits))
                for answer in _receive(connection, path):
                    yield answer
                    num_read += 1
        except UnreadableImage as error:
            if num_read <= 1:
                raise
            raise UnreadableImage(path, f"{error.reason}, after {num_read - 1} frames") from error

    @contextlib.contextmanager
    def _borrow(self, name: str | Path, limits: DecodingLimits) -> Iterator[Connection]:
        """Yields the connection to a process, which is replaced if it has not answered in full."""
        connection, process = self._idle.get()
        try:
            yield connection
        except UnreadableImage:  # which was its answer
            raise
        except BaseException as error:
            has_ended = isinstance(error, EOFError | OSError)
            if has_ended:
                process.join(1)
            exit_code = process.exitcode
            process.kill()
            connection.close()
            connection, process = self._start()
            if has_ended:
                raise UnreadableImage(name, _explain(exit_code, limits)) from error
            raise
        finally:
            self._idle.put((connection, process))

    def _start(self) -> tuple[Connection, BaseProcess]:
        here, there = self._context.Pipe()
        process = self._context.Process(
            target=_decode_all, args=(there, here), name="decoder", daemon=True
        )
        process.start()
        there.close()  # so that the end of the process ends the pipe
        return here, process


def end_if_imported_by_child() -> None:
    """Ends this process if it is a child that still imports the script of the program.

    A script without ``if __name__ == "__main__":`` would start everything again in each child.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise SystemExit(1)


def _explain(exit_code: int | None, limits: DecodingLimits) -> str:
    """Returns the reason why a decoding process ended."""
    if exit_code == -signal.SIGALRM:
        return f"decoding takes more than {limits.seconds:g} s"
    if exit_code == -signal.SIGKILL:
        return "the decoder was killed, perhaps for lack of memory"
    return "the decoder crashed"


def _receive(connection: Connection, name: str | Path) -> Iterator[Any]:
    """Yields the answers of a process. Raises an ``UnreadableImage`` with its reason."""
    while True:
        kind, value = connection.recv()
        if kind == "end":
            return
        if kind == "unreadable":
            raise UnreadableImage(name, value)
        if kind == "pixels":  # the value is their shape
            yield _receive_pixels(connection, value)
        else:
            yield value


def _receive_pixels(connection: Connection, shape: tuple[int, ...]) -> Image:
    """Returns the pixels that ``_send_pixels`` sends.

    ``Connection.recv_bytes_into`` would need twice the memory of the image.
    """
    image = np.empty(shape, np.uint8)
    missing = image.data.cast("B")
    while missing:
        num_read = os.readv(connection.fileno(), [missing])
        if not num_read:
            raise EOFError("the decoder ended while it sent pixels")
        missing = missing[num_read:]
    return image


def _send_pixels(connection: Connection, image: Image) -> None:
    """Sends the bytes of an image, without their number."""
    missing = np.ascontiguousarray(image).data.cast("B")
    while missing:
        num_written = os.write(connection.fileno(), missing)
        missing = missing[num_written:]


def count_decoders() -> int:
    """Returns a suitable number of decoding processes for this machine."""
    return max(2, min(4, os.cpu_count() or 1))


def _decode_all(connection: Connection, other_end: Connection) -> None:
    """Answers requests until the program ends."""
    other_end.close()  # inherited; otherwise the pipe would not end with the program
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the program, which ends this process
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # The alarm has no handler, so it ends this process even within a C library.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    PIL.Image.MAX_IMAGE_PIXELS = None  # the limit of the request counts
    with contextlib.suppress(EOFError, ConnectionError):  # the program ended
        while True:
            request = connection.recv()
            content = None if request.path else connection.recv_bytes()
            _answer(connection, request, content)


def _answer(connection: Connection, request: _Request, content: bytes | None) -> None:
    """Sends the results of a request: pairs of a kind and a value, and then "end"."""
    try:
        for result in _timed(_run(request, content), request.limits.seconds):
            if isinstance(result, np.ndarray):
                connection.send(("pixels", result.shape))
                _send_pixels(connection, result)
            else:
                connection.send(("value", result))
    except UnreadableImage as error:
        connection.send(("unreadable", error.reason))
    except MemoryError:
        connection.send(("unreadable", "there is not enough memory to decode it"))
    else:
        connection.send(("end", None))


def _timed(results: Iterator[T], seconds: float) -> Iterator[T]:
    """Yields results. The process ends if one of them takes more seconds."""
    while True:
        signal.setitimer(signal.ITIMER_REAL, min(seconds, 1e6))  # the system's limit is larger
        try:
            result = next(results)
        except StopIteration:
            return
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        yield result


def _run(request: _Request, content: bytes | None) -> Iterator[Any]:
    """Yields the results of a request."""
    limits = request.limits
    path = request.path or Path()
    if request.kind == "image":
        file = open_file(path) if content is None else io.BytesIO(content)
        with file:
            yield decode_image(file, path, formats=limits.formats, max_pixels=limits.max_pixels)
    elif request.kind == "check":
        _check(path, limits)
    else:
        frames, fps, num_frames = open_frames(path, str(path), max_pixels=limits.max_pixels)
        yield fps, num_frames
        for frame in frames:
            yield frame.image


def _check(path: Path, limits: DecodingLimits) -> None:
    """Decodes an image file. Raises an ``UnreadableImage`` only if it has too many pixels."""
    try:
        with open_in_format(str(path)) as image:
            check_pixels(path, image.width, image.height, limits.max_pixels)
            turn_upright(image)
    except (MemoryError, UnreadableImage):
        raise
    except Exception:  # whoever reads the image next names the fault
        return
