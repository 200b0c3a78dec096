# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Tells by the suffix of a file whether it is an image, and whether its format can be read."""

import os

from qbheat_det.core.image_files import IMAGE_SUFFIXES

UNREAD_SUFFIXES = frozenset(
    {
        *(".arw", ".avif", ".cr2", ".cr3", ".dcm", ".dng", ".exr", ".gif", ".heic", ".heif"),
        *(".jp2", ".jxl", ".nef", ".orf", ".pgm", ".ppm", ".psd", ".raf", ".rw2", ".svg", ".tga"),
    }
)
"""Suffixes of images in formats that cannot be read, in lower case."""


def describe_format(path: str | os.PathLike[str]) -> tuple[str, str]:
    """Returns ``LeftOut.kind`` and ``LeftOut.reason`` of an image in an unread format."""
    suffix = suffix_of(path).lstrip(".")
    return f"in {suffix.upper()} format", "its format is not read: convert it to JPEG or PNG"


def is_image(path: str | os.PathLike[str]) -> bool:
    """Returns whether a file is an image in a format that can be read, by its suffix.

    A file with the suffix ".heic" is opened, because phones and messengers give it to some JPEGs.
    """
    suffix = suffix_of(path)
    if suffix in (".heic", ".heif"):
        return _is_jpeg(path)
    return suffix in IMAGE_SUFFIXES


def is_unread_image(path: str | os.PathLike[str]) -> bool:
    """Returns whether a file is an image in a format that cannot be read, by its suffix."""
    return suffix_of(path) in UNREAD_SUFFIXES and not is_image(path)


def is_image_name(name: str) -> bool:
    """Returns whether a file of this name is an image in any format."""
    return suffix_of(name) in IMAGE_SUFFIXES | UNREAD_SUFFIXES


def suffix_of(path: str | os.PathLike[str]) -> str:
    """Returns the suffix of a path in lower case, such as ".jpg"; "" if it has none."""
    return os.path.splitext(path)[1].lower()


def _is_jpeg(path: str | os.PathLike[str]) -> bool:
    """Whether a file begins like a JPEG."""
    try:
        with open(path, "rb") as stream:
            return stream.read(3) == b"\xff\xd8\xff"
    except OSError:
        return False
