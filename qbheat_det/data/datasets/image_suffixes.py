# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Which files are images, by their suffix, and which of them are read."""

import os

IMAGE_SUFFIXES = frozenset(
    {".jpg", ".jpeg", ".jfif", ".jpe", ".png", ".bmp", ".webp", ".tif", ".tiff", ".heic", ".heif"}
)
"""Suffixes of image files, in lower case. The content of a file decides about its format."""
UNREAD_SUFFIXES = frozenset(
    {
        *(".arw", ".avif", ".cr2", ".cr3", ".dcm", ".dng", ".exr", ".gif", ".jp2", ".jxl", ".nef"),
        *(".orf", ".pgm", ".ppm", ".psd", ".raf", ".rw2", ".svg", ".tga"),
    }
)
"""Suffixes of images in formats that are not read, in lower case."""


def describe_format(path: str | os.PathLike[str]) -> tuple[str, str]:
    """Returns the kind and the reason of an image that is left out for its format."""
    suffix = os.path.splitext(path)[1].lower().lstrip(".")
    return f"in {suffix.upper()} format", "its format is not read: convert it to JPEG or PNG"


def describe_unread(path: str | os.PathLike[str], reason: str) -> tuple[str, str]:
    """Returns the kind and the reason of an image that cannot be read."""
    if os.path.splitext(path)[1].lower() in (".heic", ".heif"):
        return describe_format(path)
    return "that cannot be read", reason


def is_image(path: str) -> bool:
    """Returns whether a file is an image that is read, by its suffix."""
    return os.path.splitext(path)[1].lower() in IMAGE_SUFFIXES
