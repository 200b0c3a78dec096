# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Reads and checks image files. EXIF orientations are applied, so that images are upright.

To save time, a JPEG that will be scaled down is decoded at 1/2, 1/4 or 1/8 of its size (Pillow's
``draft``). The pixels differ slightly from those of full decoding.

The check of a JPEG reads only its header and its last bytes, so it misses damage in the middle. If
they are wrong, or if the file has another format, the file is decoded as in training.
"""

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from detectron2.data.detection_utils import convert_PIL_to_numpy
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torchvision.io import ImageReadMode
from tqdm import tqdm

from qbheat_det.core.image_files import (
    END_OF_JPEG,
    Size,
    find_orientation,
    find_upright_size,
    open_in_format,
    open_regular,
    open_stream,
    refuse_many_scans,
    turn_upright,
)
from qbheat_det.core.text import one_line

from .checks import DataError

T = TypeVar("T")
S = TypeVar("S")

Box = tuple[int, int, int, int]
"""(left, top, right, bottom) in pixels of the upright image, with right and bottom excluded."""

REDUCTIONS: tuple[int, ...] = (8, 4, 2)  # factors by which JPEGs are scaled down in decoding
_CHUNK = 32  # number of items that a thread processes as one task
_RGB = ImageReadMode.RGB.value
# Errors of the process, such as too many open files, which say nothing about a file.
_PROCESS_ERRORS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_CLIPPED = "pixels of mode {} would be clipped to 8 bits: convert the file"


class ImageFile:
    """An open image file, of which only the header has been read.

    Attributes:
        width, height: size of the upright image in pixels.
    """

    def __init__(self, file: BinaryIO, image: Image.Image) -> None:
        """``image`` is the result of Pillow's ``Image.open`` for the open ``file``."""
        self._is_jpeg = image.format in ("JPEG", "MPO")
        if not self._is_jpeg:
            # In a PNG, the orientation may follow the pixels. A TIFF is turned by ``load``.
            image.load()
        self._file = file
        self._image = image
        self._format = image.format
        self._is_turned = find_orientation(image) != 1
        self.width, self.height = find_upright_size(image)

    def decode(self, reduction: int = 1) -> Tensor:
        """Decodes the upright image. It can be called only once.

        Args:
            reduction: factor by which a JPEG is scaled down: 1, 2, 4 or 8. Each pixel of the result
                is about the mean of ``reduction`` x ``reduction`` pixels of the file. The height
                and width are rounded up. Other formats are not scaled.

        Returns:
            The pixels (h, w, 3), uint8, RGB.
        """
        if reduction > 1:
            width, height = self._image.size
            self._image.draft("RGB", (max(1, width // reduction), max(1, height // reduction)))
        elif self._is_jpeg and not self._is_turned and self._image.mode in ("RGB", "L"):
            refuse_many_scans(self._image)
            # libjpeg-turbo gives the same pixels in torchvision as in Pillow, with fewer copies.
            # If torchvision lacks the operator, or the file is broken, Pillow decodes it below.
            with suppress(AttributeError, RuntimeError):
                self._file.seek(0)
                content = torch.frombuffer(bytearray(self._file.read()), dtype=torch.uint8)
                return torch.ops.image.decode_jpeg(content, _RGB).permute(1, 2, 0)
        return torch.from_numpy(np.array(_to_rgb(turn_upright(self._image), self._format)))

    def read(self, box: Box, at_least: int) -> Tensor:
        """Decodes a crop of the upright image. It can be called only once.

        Args:
            box: the crop, in pixels of the upright image.
            at_least: smallest shorter side of the result, in pixels. A larger crop of a JPEG is
                decoded at 1/2, 1/4 or 1/8 of its size, if its shorter side stays as long as this.

        Returns:
            The pixels (h, w, 3), uint8, RGB.
        """
        left, top, right, bottom = box
        shorter_side = min(right - left, bottom - top)
        # The largest possible reduction.
        reduction = next((by for by in REDUCTIONS if shorter_side >= by * at_least), 1)
        pixels = self.decode(reduction)
        is_reduced = pixels.shape[:2] != (self.height, self.width)  # other formats never are
        if reduction > 1 and is_reduced:
            left, top, right, bottom = _scale_down(box, reduction)
        return pixels[top:bottom, left:right]


@contextmanager
def open_image(path: str) -> Iterator[ImageFile]:
    """Context that opens an image file, in one of ``IMAGE_FORMATS``, and reads its header.

    Raises an ``UnidentifiedImageError`` for other files. Broken files raise exceptions of any type.
    """
    with open_regular(path) as file, open_stream(file) as image:
        yield ImageFile(file, image)


def resize(pixels: Tensor, height: int, width: int) -> Tensor:
    """Resizes an image (h, w, 3) to (3, height, width), uint8, bilinear with antialiasing."""
    # PyTorch's uint8 kernel needs at most half the time of Pillow's. It is fastest for a batch in
    # channels-last memory format, as here. The results differ by rounding.
    planes = pixels[None].permute(0, 3, 1, 2)  # (1, 3, h, w)
    return F.interpolate(planes, (height, width), mode="bilinear", antialias=True)[0]


def read_image(path: str, format: str | None = None) -> npt.NDArray[Any]:
    """Reads an image like Detectron2's ``read_image``, but turns each image upright exactly once.

    Args:
        path: the file, in one of ``IMAGE_FORMATS``.
        format: a mode of Pillow such as "RGB" or "L", "BGR", or "YUV-BT.601".

    Returns:
        The pixels (H, W, C), uint8 if ``format`` is "RGB", "BGR" or "L".
    """
    with open_in_format(path) as image:
        return convert_PIL_to_numpy(turn_upright(image), format)


def _scale_down(box: Box, reduction: int) -> Box:
    """Divides a box by ``reduction``, rounded to pixels. The result has at least one pixel."""
    scale = 1 / reduction
    left, top, right, bottom = (round(edge * scale) for edge in box)
    right = max(1, right)
    bottom = max(1, bottom)
    return min(left, right - 1), min(top, bottom - 1), right, bottom


def _to_rgb(image: Image.Image, format: str | None) -> Image.Image:
    """Converts an image to 8-bit RGB like Detectron2, but scales 16-bit grayscale to 8 bits.

    Detectron2 clips it instead. Raises a ``ValueError`` for 32-bit pixels, whose range is unknown.
    """
    if image.mode.startswith("I;16") or (image.mode == "I" and format == "PNG"):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    elif image.mode in ("I", "F"):
        raise ValueError(f"pixels of mode {image.mode} have no known range: convert the file")
    image.info.pop("transparency", None)  # Pillow would warn about it
    if image.mode == "RGB":
        return image
    return image.convert("RGB")


def run_threads(
    function: Callable[[S], T],
    items: Sequence[S],
    title: str,
    num_threads: int = 8,
) -> Iterator[T]:
    """Yields the result of a function for each item, in order. Threads compute the results.

    ``title`` is the title of the progress bar.
    """
    # Items are passed in chunks: passing a single item to a thread may take longer than its task.
    chunks = [items[start : start + _CHUNK] for start in range(0, len(items), _CHUNK)]
    with (
        ThreadPoolExecutor(num_threads) as pool,
        tqdm(desc=title, total=len(items), delay=2) as progress,
    ):
        for results in pool.map(lambda chunk: [function(item) for item in chunk], chunks):
            yield from results
            progress.update(len(results))


def find_image_errors(dataset_dicts: Sequence[dict[str, Any]]) -> list[DataError]:
    """Returns an error for each file that training cannot use, such as a missing or damaged one."""
    return list(match_image_errors(dataset_dicts).values())


def match_image_errors(dataset_dicts: Sequence[dict[str, Any]]) -> dict[str, DataError]:
    """Maps the ``file_name`` of each record whose file training cannot use to the error."""
    errors = run_threads(_find_image_error, dataset_dicts, "Checking image files")
    return {
        record["file_name"]: error
        for record, error in zip(dataset_dicts, errors, strict=True)
        if error is not None
    }


def _find_image_error(record: dict[str, Any]) -> DataError | None:
    """Returns the error of a record's image file, or None if training can use the file."""
    path = record["file_name"]
    where = f"image {path!r}"
    if "image_id" in record:
        where += f" (image id {record['image_id']})"
    try:
        with open_regular(path) as file:
            if _is_whole_jpeg(file, record):
                return None
        return _find_decoding_error(path, record, where)
    except FileNotFoundError:
        return DataError("missing image file", where, "the file does not exist")
    except (OSError, ValueError) as error:  # invalid file names raise a ValueError
        reason = f"the file cannot be opened: {one_line(error)}"
        return DataError("unreadable image", where, reason)


def name_unreadable(path: str, error: Exception) -> DataError:
    """Returns the error of an image whose reading failed with ``error``.

    Raises ``error`` again if the process caused it, such as by too many open files or no memory.
    """
    if isinstance(error, MemoryError):
        raise error
    if isinstance(error, OSError) and error.errno in _PROCESS_ERRORS:
        raise error
    message = one_line(error)
    if isinstance(error, UnidentifiedImageError):  # Pillow's message names the open file
        message = "not an image"
    reason = f"{type(error).__name__}: {message}"
    return DataError("unreadable image", f"image {path!r}", reason)


def is_readable(record: dict[str, Any]) -> bool:
    """Returns whether training can use the image file of a record. Decodes the whole file."""
    path = record["file_name"]
    return _find_decoding_error(path, record, f"image {path!r}") is None


def check_depth(path: str) -> None:
    """Raises a ``ValueError`` if pixels have more than 8 bits. Detectron2 would clip them."""
    with open_in_format(path) as image:
        if image.mode[0] in "IF":
            raise ValueError(_CLIPPED.format(image.mode))


def _is_whole_jpeg(file: BinaryIO, record: dict[str, Any]) -> bool:
    """Returns whether a file is a JPEG of the annotated size that ends with the end marker."""
    try:
        with Image.open(file, formats=["JPEG"]) as image:
            width, height = find_upright_size(image)
            if image.info.get("progressive"):
                refuse_many_scans(image)
            file.seek(-2, os.SEEK_END)
            last_bytes = file.read()
    except Exception:  # decoders raise many types on broken files
        return False
    has_size = (record.get("width", width), record.get("height", height)) == (width, height)
    return has_size and last_bytes == END_OF_JPEG


def _find_decoding_error(path: str, record: dict[str, Any], where: str) -> DataError | None:
    """Decodes an image file as in training. Returns an error if this fails, or None.

    Args:
        path: path of the file.
        record: record of the image. The size must be the annotated one, if it has one.
        where: name of the image, for the error.
    """
    try:
        with open_in_format(path) as image:
            mode = image.mode
    except Exception as error:
        reason = f"it cannot be opened: {one_line(error)}"
        return DataError("unreadable image", where, reason)
    if mode[0] in "IF":
        return DataError("image of more than 8 bits", where, _CLIPPED.format(mode))
    try:
        height, width = read_image(path, "RGB").shape[:2]
    except Exception as error:
        reason = f"the pixels cannot be read: {one_line(error)}"
        return DataError("truncated or damaged image", where, reason)
    annotated_width = record.get("width", width)
    annotated_height = record.get("height", height)
    if (annotated_width, annotated_height) == (width, height):
        return None
    reason = (
        f"annotated with {annotated_width} x {annotated_height} pixels, but has {width} x {height}"
    )
    if (annotated_width, annotated_height) == (height, width):
        reason += ": width and height are swapped, or ignore the EXIF rotation"
    return DataError("image of another size than annotated", where, reason)


def read_sizes(paths: Sequence[str]) -> Iterator["Size | DataError"]:
    """Yields (width, height) of each upright image, or an error if it cannot be read."""
    return run_threads(_read_size, paths, "Reading image sizes")


def _read_size(path: str) -> "Size | DataError":
    """Returns (width, height) of the upright image, or an error if it cannot be read."""
    try:
        with open_image(path) as image:
            return image.width, image.height
    except Exception as error:
        reason = f"it cannot be opened: {one_line(error)}"
        return DataError("unreadable image", f"image {path!r}", reason)
