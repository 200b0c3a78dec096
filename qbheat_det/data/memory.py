# Copyright (c) qbheat_det contributors. Apache-2.0.
"""A small set of images, decoded once and kept in memory, where forked workers share it.

An image keeps no more pixels than its smallest crop can use. Reading from files and from memory
choose the same crops.
"""

import logging
import os
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from detectron2.utils import comm
from detectron2.utils.file_io import PathManager
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from .images import ImageInMemory, open_image, resize

logger = logging.getLogger(__name__)

Size = tuple[int, int]
_SAMPLED = 64  # headers from which the size of a set is estimated, before all are read


class DecodedImages:
    """Images by file name; those that cannot be decoded are left out."""

    def __init__(self, sizes: Mapping[str, Size], *, shorter_side: int) -> None:
        """``sizes`` are (width, height), upright or not; larger images are scaled down."""
        self._shorter_side = shorter_side
        starts, self.num_bytes = {}, 0
        for file_name, size in sizes.items():
            starts[file_name] = self.num_bytes
            self.num_bytes += _count_bytes(size, shorter_side)
        # Never written to again, so forked workers share its pages.
        self._pixels = torch.empty(self.num_bytes, dtype=torch.uint8)
        self._images: dict[str, tuple[Tensor, Size]] = {}
        with ThreadPoolExecutor(_count_threads()) as pool:
            decoded = tqdm(
                pool.map(self._decode, starts, starts.values(), sizes.values()),
                desc="Decoding images into memory",
                total=len(sizes),
                delay=2,
                disable=not comm.is_main_process(),
            )
            for file_name, image in zip(sizes, decoded, strict=True):
                if image is not None:
                    self._images[file_name] = image

    def __len__(self) -> int:
        return len(self._images)

    def get(self, file_name: str) -> ImageInMemory | None:
        """Returns an image, or None if it is not in memory."""
        if file_name not in self._images:
            return None
        pixels, (width, height) = self._images[file_name]
        return ImageInMemory(pixels, width=width, height=height)

    def _decode(self, file_name: str, start: int, size: Size) -> tuple[Tensor, Size] | None:
        """Decodes an image into the memory from ``start`` on; returns it and the file's size."""
        try:
            with open_image(file_name) as image:
                full = image.width, image.height
                if sorted(full) != sorted(size):
                    return None  # another file than a moment ago
                pixels = image.read((0, 0, *full), self._shorter_side)
        except MemoryError:
            raise
        except Exception:  # the mapper meets it again, and reports it
            return None
        width, height = _scale_down(full, self._shorter_side)
        if pixels.shape[:2] != (height, width):
            pixels = resize(pixels, height, width).permute(1, 2, 0)
        kept = self._pixels[start : start + height * width * 3].view(height, width, 3)
        return kept.copy_(pixels), full


# Two loaders of one set, such as that which recalibrates BatchNorm, share its images.
_IN_USE: weakref.WeakValueDictionary[tuple[int, int], DecodedImages] = weakref.WeakValueDictionary()


def decode_if_small(
    file_names: Sequence[str], *, shorter_side: int, budget: float
) -> DecodedImages | None:
    """Decodes a set of images if it is small enough, and logs the decision.

    Args:
        file_names: of all images.
        shorter_side: that images are scaled down to, in pixels; smaller ones stay.
        budget: bytes that all processes of this machine may take; each holds its own copy.
    """
    if budget <= 0 or not file_names:
        return None
    key = (shorter_side, hash(tuple(file_names)))
    if key in _IN_USE:
        return _IN_USE[key]
    budget /= comm.get_local_size()
    sizes = _read_sizes(file_names[:: -(-len(file_names) // _SAMPLED)])
    needed = sum(_count_bytes(size, shorter_side) for size in sizes.values())
    if needed * len(file_names) <= budget * max(1, len(sizes)):
        sizes = _read_sizes(file_names)
        if sum(_count_bytes(size, shorter_side) for size in sizes.values()) <= budget:
            decoded = DecodedImages(sizes, shorter_side=shorter_side)
            logger.info(
                f"{len(decoded):,} of {len(file_names):,} images stay decoded in memory: "
                f"{decoded.num_bytes / 1e9:.2f} GB (INPUT.PRETRAIN.MEMORY_GB)"
            )
            _IN_USE[key] = decoded
            return decoded
    logger.info("Images are read from their files: decoded, INPUT.PRETRAIN.MEMORY_GB is too small")
    return None


def _read_sizes(file_names: Sequence[str]) -> dict[str, Size]:
    with ThreadPoolExecutor(_count_threads()) as pool:
        sizes = zip(file_names, pool.map(_read_size, file_names), strict=True)
        return {name: size for name, size in sizes if size is not None}


def _read_size(file_name: str) -> Size | None:
    try:
        with PathManager.open(file_name, "rb") as file, Image.open(file) as image:
            return int(image.size[0]), int(image.size[1])
    except Exception:  # as above
        return None


def _count_threads() -> int:
    return max(1, (os.cpu_count() or 1) // comm.get_local_size())


def _count_bytes(size: Size, shorter_side: int) -> int:
    width, height = _scale_down(size, shorter_side)
    return width * height * 3


def _scale_down(size: Size, shorter_side: int) -> Size:
    """Returns a size scaled down to a shorter side; the same for both orientations."""
    factor = min(1.0, shorter_side / min(size))
    return max(1, round(size[0] * factor)), max(1, round(size[1] * factor))
