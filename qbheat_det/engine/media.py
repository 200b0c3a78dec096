# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Images and videos on disk: finding them, reading them, and names for what is written."""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
import numpy.typing as npt
import PIL.Image
from detectron2.data.detection_utils import read_image

from qbheat_det.core.errors import UserError
from qbheat_det.data import IMAGE_SUFFIXES

VIDEO_SUFFIXES = frozenset({".mp4", ".avi", ".mov", ".mkv", ".webm"})

Image = npt.NDArray[np.uint8]


class UnreadableMedia(Exception):
    """A file that cannot be read as an image or video; the message is the reason."""


@dataclass(frozen=True)
class MediaFile:
    """One image or video to predict on.

    ``name`` is the path below the input folder with forward slashes, or the file's own name.
    """

    path: Path
    name: str

    @property
    def is_video(self) -> bool:
        return self.path.suffix.lower() in VIDEO_SUFFIXES


def find_media(inputs: Sequence[str], exclude: Path | None = None) -> list[MediaFile]:
    """Lists the files named by ``inputs`` and the images and videos in its folders, sorted.

    Args:
        inputs: files, taken whatever their suffix, and folders, searched recursively.
        exclude: a folder to leave out, so that earlier results are not taken for inputs.

    Raises:
        UserError: an input does not exist, or there is nothing to predict on.
    """
    found: dict[Path, MediaFile] = {}  # keyed by real path: a file named twice counts once
    for name in inputs:
        root = Path(name)
        if root.is_file():
            found.setdefault(root.resolve(), MediaFile(root, root.name))
        elif root.is_dir():
            for path in sorted(root.rglob("*")):
                if path.suffix.lower() not in IMAGE_SUFFIXES | VIDEO_SUFFIXES:
                    continue
                real = path.resolve()
                if path.is_file() and not (exclude and real.is_relative_to(exclude.resolve())):
                    found.setdefault(real, MediaFile(path, path.relative_to(root).as_posix()))
        else:
            raise UserError(f"input '{name}' does not exist (config overrides go last)")
    if not found:
        raise UserError(f"no images or videos in {', '.join(inputs)}")
    return list(found.values())


def name_outputs(media: Sequence[MediaFile]) -> list[Path]:
    """Returns distinct relative paths of the drawn images and videos.

    JPEG stays JPEG, other images become PNG, videos MP4. After ``a.png``, ``a.bmp`` is ``a-2.png``.
    """
    taken: set[str] = set()
    outputs = []
    for file in media:
        suffix = ".jpg" if file.path.suffix.lower() in {".jpg", ".jpeg"} else ".png"
        wanted = Path(file.name).with_suffix(".mp4" if file.is_video else suffix)
        path, count = wanted, 1
        while str(path).lower() in taken:  # some file systems do not tell a.png from A.png
            count += 1
            path = wanted.with_name(f"{wanted.stem}-{count}{wanted.suffix}")
        taken.add(str(path).lower())
        outputs.append(path)
    return outputs


def read_bgr(path: Path) -> Image:
    """Reads an image upright, as its EXIF orientation says: (H, W, 3), BGR.

    Raises:
        UnreadableMedia: the file cannot be decoded.
    """
    try:
        with PIL.Image.open(path) as header:
            is_16_bit = header.mode.startswith("I")
        image: Image = read_image(str(path), format="BGR")
    except PIL.UnidentifiedImageError as error:
        raise UnreadableMedia("not an image") from error
    except Exception as error:  # what a broken file raises depends on its format's decoder
        raise UnreadableMedia(" ".join(str(error).split()) or type(error).__name__) from error
    if is_16_bit:  # Pillow turns all values above 255 into white
        raise UnreadableMedia("16 bits of grey: convert it to 8 first")
    return image


def write_image(path: Path, image: Image) -> None:
    """Writes a (H, W, 3) BGR image; its folder is made.

    Raises:
        UserError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        PIL.Image.fromarray(image[:, :, ::-1]).save(path, quality=92)
    except OSError as error:
        raise UserError(f"cannot write '{path}': {error.strerror or error}") from error


def read_video(path: Path) -> tuple[Iterator[Image], float, int | None]:
    """Opens a video.

    Returns:
        Its frames one by one, (H, W, 3) BGR; frames per second, 25 if the file does not say; and
        an estimate of the number of frames, None if there is none.

    Raises:
        UnreadableMedia: OpenCV finds no frame in the file.
    """
    capture = cv2.VideoCapture(str(path))
    found, first = capture.read()
    if not found:
        raise UnreadableMedia("not a video: no frame could be decoded")

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

    Raises:
        UserError: OpenCV on this machine cannot write MP4 there.
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
