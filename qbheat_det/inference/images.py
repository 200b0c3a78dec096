# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Opens files, folders, glob patterns, videos, PIL images, arrays and tensors as images.

Opened images are RGB arrays (H, W, 3), uint8, in the orientation that EXIF data state.
"""

import contextlib
import glob
import itertools
import logging
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, TypeVar, Union

import numpy as np
import numpy.typing as npt
import PIL.Image

from qbheat_det.core.errors import UserError
from qbheat_det.core.image_files import (
    IMAGE_FORMATS,
    IMAGE_SUFFIXES,
    open_regular,
    turn_upright,
)
from qbheat_det.core.object_stores import fetch
from qbheat_det.core.text import one_line

if TYPE_CHECKING:  # an exported file runs without PyTorch
    from torch import Tensor

logger = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")
Image = npt.NDArray[np.uint8]
Picture = Union[str, Path, PIL.Image.Image, Image, "Tensor"]
"""A file, a PIL image, an RGB array (H, W, 3) of uint8, or an RGB tensor (3, H, W) of uint8 or of
floats in [0, 1]."""

_DEFAULT_FPS = 25.0  # frames per second of a video that does not state them
VIDEO_SUFFIXES = frozenset({".mp4", ".avi", ".mov", ".mkv", ".webm"})


class UnreadableImage(UserError):
    """An error for a file that cannot be read as an image or a video, with the reason."""

    def __init__(self, name: str | Path, reason: str) -> None:
        super().__init__(f"'{name}' cannot be read: {reason}")
        self.reason = reason


class NamedImage(NamedTuple):
    """An image with its origin. ``file`` is the file to read it from again, or None."""

    image: Image
    file: Path | None
    name: str  # the path, or a text such as "image 3"
    frame: int | None = None  # index in a video, from 0


class InputFile(NamedTuple):
    """A file to predict on. ``name`` is its path relative to the input folder, or the file name."""

    path: Path
    name: str

    @property
    def is_video(self) -> bool:
        """Whether the file has the suffix of a video."""
        return is_video(self.path)


def is_video(source: object) -> bool:
    """Returns whether a path has the suffix of a video."""
    return isinstance(source, str | Path) and Path(source).suffix.lower() in VIDEO_SUFFIXES


def is_collection(source: object) -> bool:
    """Returns whether a source has several images.

    This is so for an iterable, a folder, and a glob pattern such as "photos/*.jpg".
    """
    if isinstance(source, str | Path):
        path = Path(source)
        return path.is_dir() or (glob.has_magic(str(source)) and not path.exists())
    # An array or tensor is one image. A mapping has keys, which are not images.
    is_other = isinstance(source, PIL.Image.Image | np.ndarray | Mapping | bytes)
    return isinstance(source, Iterable) and not is_other and not _is_tensor(source)


def _is_tensor(source: object) -> bool:
    """Returns whether a source is a tensor. A program without PyTorch has none."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(source, torch.Tensor)


def find_inputs(inputs: Sequence[str], exclude: Path | None = None) -> list[InputFile]:
    """Lists the input files, and all images and videos in the input folders and their subfolders.

    Addresses such as s3://bucket/folder are downloaded into the cache. In folders, hidden files are
    left out, and files in the folder ``exclude``, such as earlier results. Raises a ``UserError``
    if an input does not exist, or if no image or video is found.
    """
    excluded = None if exclude is None else exclude.resolve()
    files: dict[Path, InputFile] = {}  # by real path, so that no file is listed twice
    for name in inputs:
        root = Path(fetch(name))
        if root.is_file():
            files.setdefault(root.resolve(), InputFile(root, root.name))
            continue
        if not root.is_dir():
            raise UserError(f"input '{name}' does not exist")
        for path in _list_media(root):
            if path.is_file():
                real_path = path.resolve()
            elif not path.exists():
                real_path = path  # a broken link, which is listed to be reported as unreadable
            else:  # a folder with the name of an image
                continue
            if excluded is not None and real_path.is_relative_to(excluded):
                continue
            files.setdefault(real_path, InputFile(path, path.relative_to(root).as_posix()))
    if not files:
        raise UserError(f"no images or videos in {', '.join(inputs)}")
    return list(files.values())


def _list_media(root: Path) -> list[Path]:
    """Lists the paths in a folder and its subfolders with the suffix of an image or a video.

    Hidden files, and files in hidden folders, are left out.
    """
    suffixes = IMAGE_SUFFIXES | VIDEO_SUFFIXES
    paths = []
    for path in root.rglob("*"):
        if path.suffix.lower() not in suffixes:
            continue
        if not any(part.startswith(".") for part in path.relative_to(root).parts):
            paths.append(path)
    return sorted(paths)


def open_images(source: Picture | Iterable[Picture]) -> Iterator[NamedImage]:
    """Iterates over one image, an iterable, a folder, a glob pattern, or a video's frames.

    In folders and patterns, videos are ignored, and unreadable files are skipped with a warning.
    An iterable of images may be a generator, whose images are opened one by one.

    Raises:
        UserError: there are no images. The iterator raises a ``UserError`` if an image of an
            iterable cannot be read, or if a generator yields no image.
    """
    if is_video(source):
        path = Path(str(source))
        frames, _, _ = open_frames(path, str(path))
        return frames
    if not is_collection(source):
        return iter([_open(source, "image")])  # type: ignore[arg-type]  # one picture
    if not isinstance(source, str | Path):
        if isinstance(source, Sized) and not len(source):
            raise UserError("the list of images is empty")
        return _open_each(source)  # type: ignore[arg-type]  # an iterable
    paths = [str(source)]
    if not Path(str(source)).is_dir():  # a pattern
        matches = sorted(glob.glob(str(source)))
        # If nothing matches, ``find_inputs`` gets the pattern, and names it in its error.
        paths = matches or paths
    files = [file for file in find_inputs(paths) if not file.is_video]
    if not files:
        raise UserError(f"'{source}' has no images; pass videos one by one")
    return _open_readable(files)


def _open_each(pictures: Iterable[Picture]) -> Iterator[NamedImage]:
    """Yields the images. Raises a ``UserError`` if there are none."""
    index = -1
    for index, picture in enumerate(pictures):
        yield _open(picture, f"image {index}")
    if index < 0:
        raise UserError("the iterable of images is empty")


def _open(picture: Picture, name: str) -> NamedImage:
    """Opens one picture. ``name`` is the name of a picture that is not a file."""
    if not isinstance(picture, str | Path):
        return NamedImage(read_rgb(picture), None, name)
    if is_video(picture) or is_collection(picture):
        raise UserError(f"'{picture}' is in a list of images but is not an image: pass it alone")
    return NamedImage(read_rgb(picture), Path(picture), str(picture))


def _open_readable(files: Sequence[InputFile]) -> Iterator[NamedImage]:
    """Yields the readable images, and logs a warning for each unreadable file."""
    for file in files:
        try:
            yield _open(file.path, file.name)
        except UserError as error:
            logger.warning("Left out: %s", error)


def read_rgb(picture: Picture) -> Image:
    """Converts a picture to an RGB array (H, W, 3), uint8.

    Detectron2's path manager opens files, so their paths may be addresses. Raises a ``UserError``
    if a file is not a readable image, or if an array or tensor has a wrong shape or type.
    """
    if isinstance(picture, PIL.Image.Image):
        return _to_array(picture, "the image")
    if _is_tensor(picture):
        return _from_tensor(picture)
    if isinstance(picture, str | Path):
        with open_file(picture) as file:
            return decode_image(file, picture)
    expected = "an image is an array (H, W, 3) of uint8, RGB"
    if not isinstance(picture, np.ndarray):
        raise UserError(f"{expected}, not a value of type {type(picture).__name__}")
    is_rgb = picture.ndim == 3 and picture.shape[2] == 3 and picture.size > 0
    if not is_rgb or picture.dtype != np.uint8:
        raise UserError(f"{expected}, not {picture.dtype} of shape {picture.shape}")
    return np.array(picture)


def open_file(path: str | Path) -> BinaryIO:
    """Opens the file at a path or an address, or raises an ``UnreadableImage``."""
    try:
        return open_regular(str(path))
    except (OSError, ValueError) as error:  # invalid file names raise a ValueError
        raise UnreadableImage(path, one_line(error)) from error


def check_pixels(name: str | Path, width: int, height: int, max_pixels: float) -> None:
    """Raises an ``UnreadableImage`` if an image has more than ``max_pixels`` pixels."""
    if width * height > max_pixels:
        raise UnreadableImage(
            name,
            f"{width} x {height} pixels are more than {max_pixels / 1e6:g} million pixels",
        )


def run_by_shape(
    items: Sequence[T], run: Callable[[list[T]], Sequence[R]], key: Callable[[T], Sequence[int]]
) -> list[R]:
    """Runs a function on groups of items, and returns one result per item, in their order.

    All items of a group have the same ``key``, such as the image size. ``run`` takes the items of a
    group, and returns one result per item.
    """
    groups: dict[tuple[int, ...], list[int]] = {}  # indices of the items, by key
    for index, item in enumerate(items):
        groups.setdefault(tuple(key(item)), []).append(index)
    results: dict[int, R] = {}  # by index of the item
    for indices in groups.values():
        outputs = run([items[index] for index in indices])
        results.update(zip(indices, outputs, strict=True))
    return [results[index] for index in range(len(items))]


def decode_image(
    file: BinaryIO,
    name: str | Path,
    *,
    formats: Sequence[str] = IMAGE_FORMATS,
    max_pixels: float = math.inf,
) -> Image:
    """Decodes an open image file to RGB (H, W, 3), uint8.

    ``formats`` are Pillow's names of the allowed formats. Raises ``UnreadableImage`` if the file
    has another format, is broken, has 16-bit grayscale pixels, more scans than ``MAX_SCANS``, or if
    its header states more than ``max_pixels`` pixels.
    """
    try:
        with PIL.Image.open(file, formats=list(formats)) as image:
            check_pixels(name, image.width, image.height, max_pixels)
            return _to_array(image, name)
    except (MemoryError, UserError):
        raise
    except PIL.UnidentifiedImageError as error:
        raise UnreadableImage(name, "not an image") from error
    except Exception as error:  # decoders raise different types on broken files
        raise UnreadableImage(name, f"a broken image: {one_line(error)}") from error


def _to_array(image: PIL.Image.Image, name: str | Path) -> Image:
    """Converts a PIL image. ``name`` names it in errors."""
    if image.mode.startswith("I"):  # Pillow would turn all values above 255 into white
        raise UnreadableImage(name, "grayscale of 16 bits: convert it to 8 bits first")
    return np.array(turn_upright(image).convert("RGB"))


def _from_tensor(tensor: Any) -> Image:
    """Converts a tensor (3, H, W) of uint8, or of floats in [0, 1]."""
    import torch

    pixels = tensor.detach().cpu()
    is_rgb = pixels.ndim == 3 and pixels.shape[0] == 3 and pixels.numel() > 0
    if not is_rgb:
        raise UserError(f"an image is a tensor (3, H, W), not {tuple(pixels.shape)}")
    if pixels.is_floating_point():
        is_in_range = 0 <= pixels.min() and pixels.max() <= 1  # False for nan
        if not is_in_range:
            raise UserError("an image of floats has values in [0, 1], RGB, not normalized")
        pixels = (pixels.float() * 255).round().to(torch.uint8)
    if pixels.dtype != torch.uint8:
        raise UserError(f"an image is a tensor of uint8 or floats, not {pixels.dtype}")
    return np.ascontiguousarray(pixels.permute(1, 2, 0).numpy())


def open_frames(
    path: Path, name: str, *, max_pixels: float = math.inf
) -> tuple[Iterator[NamedImage], float, int | None]:
    """Opens a video with OpenCV.

    Returns an iterator over the frames, the frames per second (25 if unknown), and the estimated
    number of frames (None if unknown). ``name`` is the name of each frame. Raises
    ``UnreadableImage`` if no frame can be decoded, or if frames have more than ``max_pixels``.
    """
    import cv2  # images do not need it

    # FFmpeg takes a relative name such as "concat:other.mp4" for a protocol, not for a file.
    capture = cv2.VideoCapture(str(path.absolute()))
    width = int(capture.get(cv2.CAP_PROP_FRAME_WIDTH))
    height = int(capture.get(cv2.CAP_PROP_FRAME_HEIGHT))
    check_pixels(path, width, height, max_pixels)
    is_decoded, first_frame = capture.read()
    if not is_decoded:
        raise UnreadableImage(path, "not a video: no frame could be decoded")

    def read_frames() -> Iterator[NamedImage]:
        frame = first_frame
        for index in itertools.count():
            rgb = np.ascontiguousarray(frame[:, :, ::-1])  # from BGR
            yield NamedImage(rgb, None, name, index)
            is_decoded, frame = capture.read()
            if not is_decoded:
                capture.release()
                return

    fps = capture.get(cv2.CAP_PROP_FPS)
    is_plausible = 0 < fps < 1000
    if not is_plausible:
        fps = _DEFAULT_FPS
    frame_count = int(capture.get(cv2.CAP_PROP_FRAME_COUNT))  # 0 or negative if unknown
    num_frames = frame_count if frame_count > 0 else None
    return read_frames(), fps, num_frames


@contextlib.contextmanager
def open_video(path: Path, fps: float) -> Iterator[Callable[[Image], None]]:
    """Yields a function that appends a frame to an MP4 file.

    The file is renamed to ``path`` when it is complete. All frames must have the same size. MPEG-4
    needs even sizes, so OpenCV drops an odd last row or column. Raises a ``UserError`` if OpenCV
    cannot write MP4 files on this machine.
    """
    import cv2  # images do not need it

    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.stem}.partial{path.suffix}")
    writer = cv2.VideoWriter()

    def append(frame: Image) -> None:
        """Appends a frame (H, W, 3), RGB. The first one sets the size of the video."""
        if not writer.isOpened():
            height, width = frame.shape[:2]
            fourcc = cv2.VideoWriter.fourcc(*"mp4v")
            if not writer.open(str(partial), fourcc, fps, (width, height)):
                raise UserError(f"OpenCV cannot write the video '{path}' on this machine")
        writer.write(np.ascontiguousarray(frame[:, :, ::-1]))

    try:
        yield append
        writer.release()
        os.replace(partial, path)
    finally:
        writer.release()
        partial.unlink(missing_ok=True)
