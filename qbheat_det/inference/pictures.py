# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Images however they are given: files, addresses, folders, patterns, videos, Pillow, arrays."""

import glob
import http.client
import io
import logging
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import PIL.Image
import PIL.ImageOps
import torch
from torch import Tensor

from qbheat_det.core.errors import UserError
from qbheat_det.core.text import format_bytes, one_line
from qbheat_det.data import IMAGE_FORMATS

from .predict import InputFile, find_inputs, read_bgr
from .video import VIDEO_SUFFIXES, Image, UnreadableImage, read_video

logger = logging.getLogger(__name__)

Picture = str | Path | PIL.Image.Image | Image | Tensor
"""A file, an address http(s)://…, a PIL image, an array (H, W, 3) of uint8, or a tensor (3, H, W)
of uint8 or of floats in [0, 1]; RGB."""

MAX_DOWNLOAD = 64 * 2**20  # bytes
_TIMEOUT = 20.0  # seconds without an answer
_WEB = ("http://", "https://")


class NamedImage(NamedTuple):
    """An image (H, W, 3) of uint8, RGB, upright, and where it is from.

    ``file`` is where it can be read again, None for what was no local image file; ``name`` is the
    path, the address or "image 3"; ``frame`` counts those of a video from 0.
    """

    image: Image
    file: Path | None
    name: str
    frame: int | None = None


def is_video(source: object) -> bool:
    """Whether a path has the suffix of a video."""
    return isinstance(source, str | Path) and Path(source).suffix.lower() in VIDEO_SUFFIXES


def is_collection(source: object) -> bool:
    """Whether it is a list, a folder or a pattern such as "photos/*.jpg"."""
    if isinstance(source, str | Path):
        path = str(source)
        return not path.startswith(_WEB) and (
            Path(path).is_dir() or (glob.has_magic(path) and not Path(path).exists())
        )
    return isinstance(source, list | tuple)


def open_images(source: Picture | Sequence[Picture]) -> Iterator[NamedImage]:
    """Opens the images of a source one after another.

    It is one image, a list of them, a folder (searched recursively), a pattern, or a video. Of
    folders and patterns, files that cannot be read are left out with a warning, and videos are not
    opened. Raises a ``UserError`` now if there is none, later if one of a list cannot be read.
    """
    if is_video(source):
        return _open_frames(Path(str(source)))
    if not is_collection(source):
        return iter([_open(source, "image")])  # type: ignore[arg-type]  # one picture
    if isinstance(source, list | tuple):
        if not source:
            raise UserError("the list of images is empty")
        return (_open(each, f"image {index}") for index, each in enumerate(source))
    paths = [str(source)] if Path(str(source)).is_dir() else sorted(glob.glob(str(source)))
    files = [file for file in find_inputs(paths or [str(source)]) if not file.is_video]
    if not files:
        raise UserError(f"'{source}' has no images; videos are opened by their own names")
    return _open_readable(files)


def read_rgb(picture: Picture) -> Image:
    """Returns an image as an array (H, W, 3) of uint8, RGB, upright as its EXIF orientation says.

    Raises a ``UserError`` if a file does not exist or is no image, an address gives none, or an
    array or a tensor has another shape or type.
    """
    if isinstance(picture, PIL.Image.Image):
        if picture.mode.startswith("I"):  # Pillow turns all values above 255 into white
            raise UserError("an image has 16 bits of grey: convert it to 8 first")
        return np.array(PIL.ImageOps.exif_transpose(picture).convert("RGB"))
    if isinstance(picture, str | Path):
        if str(picture).startswith(_WEB):
            return fetch_image(str(picture))
        try:
            return read_bgr(Path(picture))[:, :, ::-1].copy()
        except UnreadableImage as error:
            raise UserError(f"'{picture}' cannot be read: {error}") from error
    if isinstance(picture, Tensor):
        return _from_tensor(picture)
    is_array = isinstance(picture, np.ndarray) and picture.dtype == np.uint8
    if not (is_array and picture.ndim == 3 and picture.shape[2] == 3 and picture.size):
        found = getattr(picture, "dtype", type(picture).__name__), getattr(picture, "shape", "")
        raise UserError(f"an image is an array (H, W, 3) of uint8, RGB, not {found}")
    return np.array(picture)


def fetch_image(url: str) -> Image:
    """Downloads an image, at most ``MAX_DOWNLOAD`` bytes; see ``read_rgb``.

    Raises a ``UserError`` if the address does not answer, leads elsewhere than to http(s), or is no
    image.
    """
    # Handlers of the web alone: no redirection leads to a file, and no other scheme is known.
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.UnknownHandler(),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPRedirectHandler(),
        urllib.request.HTTPErrorProcessor(),
    ):
        opener.add_handler(handler)
    request = urllib.request.Request(url, headers={"User-Agent": "qbheat_det"})
    try:
        with opener.open(request, timeout=_TIMEOUT) as answer:
            content = answer.read(MAX_DOWNLOAD + 1)
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise UserError(f"'{url}' cannot be downloaded: {one_line(error)}") from error
    if len(content) > MAX_DOWNLOAD:
        raise UserError(f"'{url}' is refused: it has more than {format_bytes(MAX_DOWNLOAD)}")
    try:
        with PIL.Image.open(io.BytesIO(content), formats=IMAGE_FORMATS) as image:
            return read_rgb(image)
    except UserError as error:
        raise UserError(f"'{url}': {error}") from error
    except Exception as error:  # what a broken file raises depends on its format's decoder
        raise UserError(f"'{url}' is no image that can be read: {one_line(error)}") from error


def _from_tensor(tensor: Tensor) -> Image:
    pixels = tensor.detach().cpu()
    if pixels.ndim != 3 or len(pixels) != 3 or not pixels.numel():
        raise UserError(f"an image is a tensor (3, H, W), not {tuple(pixels.shape)}")
    if pixels.is_floating_point():
        if not (0 <= pixels.min() and pixels.max() <= 1):  # also refuses NaN
            raise UserError("an image of floats has values in [0, 1], RGB, not normalised")
        pixels = (pixels.float() * 255).round().to(torch.uint8)
    if pixels.dtype != torch.uint8:
        raise UserError(f"an image is a tensor of uint8 or floats, not {pixels.dtype}")
    return np.ascontiguousarray(pixels.permute(1, 2, 0).numpy())


def _open(picture: Picture, name: str) -> NamedImage:
    if isinstance(picture, str | Path):
        if is_video(picture) or is_collection(picture):
            raise UserError(f"'{picture}' stands in a list of images: name it by itself")
        is_local = not str(picture).startswith(_WEB)
        return NamedImage(read_rgb(picture), Path(picture) if is_local else None, str(picture))
    return NamedImage(read_rgb(picture), None, name)


def _open_readable(files: Sequence[InputFile]) -> Iterator[NamedImage]:
    for file in files:
        try:
            yield _open(file.path, file.name)
        except UserError as error:
            logger.warning("Left out: %s", error)


def _open_frames(path: Path) -> Iterator[NamedImage]:
    try:
        frames, _, _ = read_video(path)
    except UnreadableImage as error:
        raise UserError(f"'{path}' cannot be read: {error}") from error
    return (
        NamedImage(np.ascontiguousarray(frame[:, :, ::-1]), None, str(path), index)
        for index, frame in enumerate(frames)
    )
