# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Opens image files with Pillow, and turns them upright. Does not import PyTorch or Detectron2."""

import os
import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO

from PIL import Image, UnidentifiedImageError

Size = tuple[int, int]
"""(width, height) in pixels."""

IMAGE_SUFFIXES = frozenset(
    {".jpg", ".jpeg", ".jfif", ".jpe", ".png", ".bmp", ".webp", ".tif", ".tiff"}
)
"""Suffixes of images in formats that can be read, in lower case."""
# The allowed formats. The content of a file decides, not its suffix. (Pillow opens MPO as JPEG.)
# Other formats are unsafe: for EPS, Pillow would start another program.
IMAGE_FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "TIFF", "GIF", "PPM")
MAX_SCANS = 50
"""Largest number of scans of a JPEG. Each one takes as long as a whole image. Usual files have at
most 12, and a small file with thousands would take minutes."""
END_OF_JPEG = b"\xff\xd9"
_START_OF_SCAN = b"\xff\xda"
# Within the data of a scan, 0 follows each byte ff, and the markers d0 to d7 divide the data.
_MARKERS_WITHOUT_LENGTH = (b"\xff\x01", b"\xff\xd8")
_MARKER = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")
_ORIENTATION = 0x0112  # EXIF tag; its values from 5 on swap width and height

_METHODS = {  # that turn an image of an EXIF orientation upright, as in Detectron2
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def open_regular(path: str) -> BinaryIO:
    """Opens a file. Detectron2's path manager opens a path that is an address.

    Raises an ``OSError`` for a pipe or a device, such as ``/dev/stdin``, which may never end.
    """
    mode = 0  # of an address, and of a file that is not there
    with suppress(OSError, ValueError):
        mode = os.stat(path).st_mode
    if mode and not stat.S_ISREG(mode):
        raise OSError(f"'{path}' is not a regular file")
    if mode or "://" not in path:  # a missing file raises its usual error
        return open(path, "rb")
    from .path_handlers import PathManager  # imports Detectron2, which local files do not need

    return PathManager.open(path, "rb")


@contextmanager
def open_in_format(path: str) -> Iterator[Image.Image]:
    """Context that opens an image file with Pillow, in one of ``IMAGE_FORMATS``.

    Other formats may run programs, such as Ghostscript for EPS. Raises an
    ``UnidentifiedImageError`` for them.
    """
    with open_regular(path) as file, open_stream(file) as image:
        yield image


def open_stream(file: BinaryIO) -> Image.Image:
    """Opens an image file in one of ``IMAGE_FORMATS``, or raises an ``UnidentifiedImageError``."""
    try:
        return Image.open(file, formats=IMAGE_FORMATS)
    except UnidentifiedImageError:  # Pillow's message is about the open stream
        raise UnidentifiedImageError(
            f"not an image in one of the formats {', '.join(IMAGE_FORMATS)}"
        ) from None


def find_orientation(image: Image.Image) -> int:
    """Returns the EXIF orientation, or 1 (upright) if it is invalid, as in Detectron2."""
    try:
        orientation: Any = image.getexif().get(_ORIENTATION)
    except Exception:
        return 1
    if orientation not in range(1, 9):
        return 1
    return int(orientation)


def find_upright_size(image: Image.Image) -> Size:
    """Returns (width, height) of an image after its EXIF orientation is applied."""
    width, height = image.size
    if find_orientation(image) >= 5:  # turned by 90 degrees
        return height, width
    return width, height


def turn_upright(image: Image.Image) -> Image.Image:
    """Decodes an image and applies its EXIF orientation exactly once.

    Pillow turns a TIFF itself while it decodes it, and then deletes its orientation. Detectron2
    looks up the orientation before that, so it turns a TIFF twice. Raises a ``ValueError`` for a
    JPEG with more than ``MAX_SCANS`` scans.
    """
    refuse_many_scans(image)
    image.load()
    method = _METHODS.get(find_orientation(image))
    if method is None:
        return image
    return image.transpose(method)


def refuse_many_scans(image: Image.Image) -> None:
    """Raises a ``ValueError`` if a JPEG that is not decoded yet has too many scans."""
    file = getattr(image, "fp", None)  # None if the image is decoded
    if image.format not in ("JPEG", "MPO") or file is None or file.closed:
        return
    position = file.tell()
    file.seek(0)
    content = file.read()
    file.seek(position)
    # Counting bytes is fast. Thumbnails, or a video after the image, have such bytes too.
    if content.count(_START_OF_SCAN) > MAX_SCANS and _count_scans(content) > MAX_SCANS:
        raise ValueError(f"a JPEG with more than {MAX_SCANS} scans")


def _count_scans(content: bytes) -> int:
    """Counts the scans of a JPEG up to its end marker."""
    num_scans = 0
    position = 2
    while True:
        found = _MARKER.search(content, position)
        if found is None or found[0] == END_OF_JPEG:
            return num_scans
        marker = found[0]
        position = found.end()
        if marker == _START_OF_SCAN:
            num_scans += 1
        if marker not in _MARKERS_WITHOUT_LENGTH:
            position += int.from_bytes(content[position : position + 2], "big")


def find_elongation(sides: Sequence[int], longest: float) -> str | None:
    """Returns an error if an image's shorter side would be below one pixel after resizing, or None.

    Args:
        sides: height and width of the image in pixels, in any order.
        longest: length in pixels to which the longer side is resized.
    """
    shorter, longer = sorted(sides)
    if shorter * longest >= longer:  # the resized shorter side is shorter * longest / longer
        return None
    return f"{longer} x {shorter} pixels is too elongated to be resized"
