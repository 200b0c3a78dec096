# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Image files: reading a part with no more pixels than are needed, and checking whole sets.

The size is known from the header, so the part can be chosen first and a JPEG be decoded at 1/2, 1/4
or 1/8 of its size (Pillow's ``draft``), which differs no more than bilinear and box resizing do. A
small set can be decoded once and kept in memory, where forked workers share it.

A check trusts a JPEG by its header and its last bytes. What looks wrong, and any other format, is
decoded by the function that training calls. Damage in the middle of a JPEG is not found.
"""

import logging
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, BinaryIO

import numpy as np
import torch
import torch.nn.functional as F
from detectron2.data.detection_utils import read_image
from detectron2.utils import comm
from detectron2.utils.file_io import PathManager
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor
from tqdm import tqdm

from qbheat_det.core.errors import UserError

from .checks import DataError

logger = logging.getLogger(__name__)

Box = tuple[int, int, int, int]
"""Left, top, right, bottom in whole pixels of the upright image, right and bottom not included."""

Size = tuple[int, int]
"""Width and height in pixels."""

ORIENTATION = 0x0112
"""EXIF tag; from 5 on, width and height change places."""

# What a file may be, whatever its name says (MPO opens as JPEG). Not EPS, for which Pillow starts
# another program.
IMAGE_FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "TIFF", "GIF", "PPM")
_SAMPLED = 64  # headers from which the size of a set in memory is estimated
_REDUCTIONS: tuple[int, ...] = (8, 4, 2)


class ImageFile:
    """An open image file, rotated as its EXIF orientation says."""

    def __init__(self, image: Image.Image) -> None:
        """``image`` is opened and not decoded."""
        if image.format not in ("JPEG", "MPO"):
            image.load()  # a PNG may have its EXIF last, and a TIFF turns itself
        turned = find_orientation(image) in range(2, 9)
        self._format = image.format
        self._image = ImageOps.exif_transpose(image) if turned else image
        self.width, self.height = self._image.size

    def read(self, box: Box, at_least: int) -> Tensor:
        """Returns the part in a box, (h, w, 3), uint8, RGB, of ``at_least`` h and w; once."""
        side = min(box[2] - box[0], box[3] - box[1])
        reduction = next((by for by in _REDUCTIONS if side >= by * at_least), 1)
        width, height = self._image.size
        # Upright JPEGs alone have drafts. Pixel i is made of i * reduction and those after it.
        drafted = reduction > 1 and self._image.draft(
            "RGB", (max(1, width // reduction), max(1, height // reduction))
        )
        part = self._image.crop(_scale(box, 1 / reduction, 1 / reduction) if drafted else box)
        return torch.from_numpy(np.array(_to_rgb(part, self._format)))


@contextmanager
def open_image(path: str) -> Iterator[ImageFile]:
    """Opens an image file; what a broken one raises depends on its format's decoder."""
    with PathManager.open(path, "rb") as file:
        try:
            image = Image.open(file, formats=IMAGE_FORMATS)
        except UnidentifiedImageError:  # its words name the open file, a temporary one at times
            raise UnidentifiedImageError("not an image") from None
        with image:
            yield ImageFile(image)


class ImageInMemory:
    """A decoded image, which may have fewer pixels than its file; boxes are in the file's."""

    def __init__(self, pixels: Tensor, *, width: int, height: int) -> None:
        """``pixels`` is (h, w, 3), uint8, RGB; width and height are those of the upright file."""
        self._pixels = pixels
        self.num_bytes = pixels.numel()
        self.width = width
        self.height = height

    def read(self, box: Box, at_least: int) -> Tensor:
        """As ``ImageFile.read``; a view of all pixels that there are."""
        height, width = self._pixels.shape[:2]
        left, top, right, bottom = _scale(box, width / self.width, height / self.height)
        return self._pixels[top:bottom, left:right]


def resize(pixels: Tensor, height: int, width: int) -> Tensor:
    """Resizes (h, w, 3) to (3, height, width), uint8, bilinear and antialiased."""
    planes = pixels.permute(2, 0, 1)[None]
    # PyTorch's own kernel for bytes takes half the time of Pillow's, and differs by rounding.
    return F.interpolate(planes, (height, width), mode="bilinear", antialias=True)[0]


def find_orientation(image: Image.Image) -> int:
    """Returns EXIF's number; 1, upright, for a broken EXIF block, as in Detectron2."""
    try:
        return int(image.getexif().get(ORIENTATION, 1))
    except Exception:
        return 1


def _scale(box: Box, horizontally: float, vertically: float) -> Box:
    """Returns a box in whole pixels of a smaller image, never empty."""
    right, bottom = max(1, round(box[2] * horizontally)), max(1, round(box[3] * vertically))
    left, top = (
        min(round(box[0] * horizontally), right - 1),
        min(round(box[1] * vertically), bottom - 1),
    )
    return left, top, right, bottom


def _to_rgb(image: Image.Image, format: str | None) -> Image.Image:
    """Converts as Detectron2 does, but scales 16 bits of grey to 8 where it would clip them."""
    if image.mode.startswith("I;16") or (image.mode == "I" and format == "PNG"):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    elif image.mode in ("I", "F"):
        raise ValueError(f"pixels of mode {image.mode} have no known range: convert the file")
    image.info.pop("transparency", None)  # Pillow warns that it drops it
    return image if image.mode == "RGB" else image.convert("RGB")


def find_image_errors(
    dataset_dicts: Sequence[dict[str, Any]], *, num_threads: int = 8
) -> list[DataError]:
    """Returns what is missing, no image, cut short or of another size than annotated, in order."""
    with ThreadPoolExecutor(num_threads) as pool:
        found = pool.map(find_image_error, dataset_dicts)
        bar = tqdm(found, desc="Checking image files", total=len(dataset_dicts), delay=2)
        return [error for error in bar if error is not None]


def find_image_error(record: dict[str, Any]) -> DataError | None:
    """Returns what is wrong with the file of one record, see ``find_image_errors``."""
    path = record["file_name"]
    try:
        with PathManager.open(path, "rb") as file:
            if _is_whole_jpeg(file, record):
                return None
        found = _read_as_training(path, record)
    except FileNotFoundError:
        found = "missing image file", "the file does not exist"
    except (OSError, ValueError) as error:  # a ValueError for names that no file can have
        found = "unreadable image", f"the file cannot be opened: {_one_line(error)}"
    if found is None:
        return None
    named = f" (image id {record['image_id']})" if "image_id" in record else ""
    return DataError(found[0], f"image {path!r}{named}", found[1])


def _is_whole_jpeg(file: BinaryIO, record: dict[str, Any]) -> bool:
    try:
        with Image.open(file, formats=["JPEG"]) as image:
            size = image.size[::-1] if find_orientation(image) in (5, 6, 7, 8) else image.size
            file.seek(-2, os.SEEK_END)
            is_whole = file.read() == b"\xff\xd9"
    except Exception:  # decoders raise nearly everything on what they do not know
        return False
    return is_whole and size == (record.get("width", size[0]), record.get("height", size[1]))


def _read_as_training(path: str, record: dict[str, Any]) -> tuple[str, str] | None:
    """Returns kind and reason of what keeps a file from being trained on, or None."""
    try:
        with PathManager.open(path, "rb") as file, Image.open(file) as image:
            mode = image.mode
    except Exception as error:
        return "unreadable image", f"the file is no image that Pillow can read: {_one_line(error)}"
    if mode[0] in "IF":
        reason = f"pixels of mode {mode} would be clipped to 8 bits: convert the file"
        return "image of more than 8 bits", reason
    try:
        height, width = read_image(path, "RGB").shape[:2]
    except Exception as error:
        reason = f"the pixels cannot be read: {_one_line(error)}"
        return "truncated or damaged image", reason
    annotated = record.get("width", width), record.get("height", height)
    if annotated == (width, height):
        return None
    reason = f"annotated with {annotated[0]} x {annotated[1]} pixels, but has {width} x {height}"
    if annotated == (height, width):
        reason += ": swapped, or the EXIF rotation is not counted in"
    return "image of another size than annotated", reason


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def read_sizes(paths: Sequence[str], *, num_threads: int = 8) -> Iterator["Size | DataError"]:
    """Yields width and height of images, upright as their EXIF orientation says, or an error."""
    with ThreadPoolExecutor(num_threads) as pool:
        bar = tqdm(pool.map(_read_size, paths), "Reading image sizes", len(paths), delay=2)
        yield from bar


def _read_size(path: str) -> "Size | DataError":
    try:
        with open_image(path) as image:
            return image.width, image.height
    except Exception as error:
        reason = f"the file is no image that Pillow can read: {_one_line(error)}"
        return DataError("unreadable image", f"image {path!r}", reason)


class DecodedImages(dict[str, ImageInMemory]):
    """Images by file name; those that cannot be decoded are left out, which the mapper reports."""

    num_bytes = 0

    def __init__(self, file_names: Sequence[str], *, shorter_side: int) -> None:
        """Decodes images, and scales those with a longer shorter side down to it."""
        super().__init__()
        threads = max(1, (os.cpu_count() or 1) // comm.get_local_size())
        with ThreadPoolExecutor(threads) as pool:
            decoded = tqdm(
                pool.map(partial(_decode, shorter_side=shorter_side), file_names),
                desc="Decoding images into memory",
                total=len(file_names),
                delay=2,
                disable=not comm.is_main_process(),
            )
            for file_name, image in zip(file_names, decoded, strict=True):
                if image is not None:
                    self[file_name] = image
                    self.num_bytes += image.num_bytes


def decode_if_small(
    records: Sequence[dict[str, Any]], *, shorter_side: int, budget: float
) -> DecodedImages | None:
    """Decodes images, scaled down to ``shorter_side``, if all take at most ``budget`` bytes."""
    if budget <= 0 or not records:
        return None
    budget /= comm.get_local_size()
    sampled = records[:: -(-len(records) // _SAMPLED)]
    needed = sum(_count_bytes(record, shorter_side) for record in sampled) / len(sampled)
    if needed * len(records) <= budget:
        file_names = [record["file_name"] for record in records]
        decoded = DecodedImages(file_names, shorter_side=shorter_side)
        if decoded.num_bytes <= budget:
            logger.info(
                f"{len(decoded):,} of {len(file_names):,} images stay decoded in memory: "
                f"{decoded.num_bytes / 1e9:.2f} GB (INPUT.PRETRAIN.MEMORY_GB)"
            )
            return decoded
    logger.info("Images are read from their files: decoded, INPUT.PRETRAIN.MEMORY_GB is too small")
    return None


def _decode(file_name: str, shorter_side: int) -> ImageInMemory | None:
    try:
        with open_image(file_name) as image:
            full = image.width, image.height
            pixels = image.read((0, 0, *full), shorter_side)
    except (MemoryError, UserError):  # a shard that cannot be had is no broken image
        raise
    except Exception:  # what a broken file raises depends on its format's decoder
        return None
    width, height = _scale_down(full, shorter_side)
    if pixels.shape[:2] != (height, width):
        pixels = resize(pixels, height, width).permute(1, 2, 0).contiguous()
    return ImageInMemory(pixels, width=full[0], height=full[1])


def _count_bytes(record: dict[str, Any], shorter_side: int) -> int:
    """Returns what an image takes in memory; 0 if its size is not known and cannot be read."""
    try:
        if "width" in record and "height" in record:
            size = record["width"], record["height"]
        else:
            with PathManager.open(record["file_name"], "rb") as file, Image.open(file) as image:
                size = image.size
    except Exception:
        return 0
    width, height = _scale_down(size, shorter_side)
    return 3 * width * height


def _scale_down(size: tuple[int, int], shorter_side: int) -> tuple[int, int]:
    """Returns a size scaled down to a shorter side; the same for both orientations."""
    factor = min(1.0, shorter_side / min(size))
    return max(1, round(size[0] * factor)), max(1, round(size[1] * factor))
