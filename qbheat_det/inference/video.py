# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Videos on disk, frame by frame, by OpenCV."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import cv2
import numpy as np
import numpy.typing as npt

from qbheat_det.core.errors import UserError

VIDEO_SUFFIXES = frozenset({".mp4", ".avi", ".mov", ".mkv", ".webm"})

Image = npt.NDArray[np.uint8]


class UnreadableImage(Exception):
    """A file that cannot be read as an image or video; the message is the reason."""


def read_video(path: Path) -> tuple[Iterator[Image], float, int | None]:
    """Opens a video, or raises ``UnreadableImage`` if OpenCV finds no frame in it.

    Returns its frames one by one, (H, W, 3) BGR; frames per second, 25 if the file does not say;
    and an estimate of the number of frames, None if there is none.
    """
    capture = cv2.VideoCapture(str(path))
    found, first = capture.read()
    if not found:
        raise UnreadableImage("not a video: no frame could be decoded")

    def read_frames() -> Iterator[Image]:
        frame, found = first, True
        while found:
            yield frame
            found, frame = capture.read()
        capture.release()

    fps, count = capture.get(cv2.CAP_PROP_FPS), int(capture.get(cv2.CAP_PROP_FRAME_COUNT))
    return read_frames(), fps if 0 < fps < 1000 else 25.0, count if count > 0 else None


@contextlib.contextmanager
def open_video(path: Path, fps: float) -> Iterator[Callable[[Image], None]]:
    """Yields a function that appends a BGR frame to an MP4, which gets its name when complete.

    All frames have one size. MPEG-4 has even sizes only: OpenCV drops an odd last row or column.
    The folder is made; a ``UserError`` if OpenCV on this machine cannot write MP4 there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.stem}.partial{path.suffix}")
    writer = cv2.VideoWriter()

    def append(frame: Image) -> None:
        if not writer.isOpened():
            height, width = frame.shape[:2]
            fourcc = cv2.VideoWriter.fourcc(*"mp4v")
            if not writer.open(str(partial), fourcc, fps, (width, height)):
                raise UserError(f"OpenCV cannot write the video '{path}' on this machine")
        writer.write(frame)

    try:
        yield append
        writer.release()
        os.replace(partial, path)
    finally:
        writer.release()
        partial.unlink(missing_ok=True)
