# Copyright (c) qbheat_det contributors. Apache-2.0.
"""A small set of images, decoded once and kept in memory, where forked workers share it.

All pixels lie in one tensor, and an image keeps no more of them than its smallest crop can use.
A crop is then a view. Reading from files and from memory choose the same crops.
"""

import logging
import os
import time
import weakref
from collections.abc import Sequence
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
_CHANNELS = 3
_SECONDS_WITHOUT_BAR = 2.0


class DecodedImages:
    """Images by file name; those that cannot be decoded are left out."""

    def __init__(
        self,
        sizes: dict[str, Size],
        *,
        shorter_side: int,
        num_threads: int = 1,
        progress: bool = False,
    ) -> None:
        """
        Args:
            sizes: width and height by file name, upright or not.
            shorter_side: that images are scaled down to, in pixels; smaller ones stay.
            num_threads: how many images are decoded side by side.
            progress: show a bar with the time left on stderr if it takes more than two seconds.
        """
        self._shorter_side = shorter_side
        starts, end = {}, 0
        for file_name, size in sizes.items():
            starts[file_name] = end
            end += _count_bytes(size, shorter_side)
        # Never written to again, so forked workers share its pages.
        self._pixels = torch.empty(end, dtype=torch.uint8)
        self._images: dict[str, tuple[Tensor, Size]] = {}
        with ThreadPoolExecutor(num_threads) as pool:
            decoded = tqdm(
                pool.map(self._decode, starts, starts.values(), sizes.values()),
                desc="Decoding images into memory",
                total=len(sizes),
                unit=" files",
                delay=_SECONDS_WITHOUT_BAR,
                disable=not progress,
            )
            for file_name, image in zip(sizes, decoded, strict=True):
                if image is not None:
                    self._images[file_name] = image

    def __len__(self) -> int:
        return len(self._images)

    @property
    def num_bytes(self) -> int:
        """Size of all pixels."""
        return self._pixels.numel()

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
        width, height = _find_kept_size(full, self._shorter_side)
        if pixels.shape[:2] != (height, width):
            pixels = resize(pixels, height, width).permute(1, 2, 0)
        kept = self._pixels[start : start + height * width * _CHANNELS]
        kept = kept.view(height, width, _CHANNELS).copy_(pixels)
        return kept, full


# Two loaders of one set, such as that which recalibrates BatchNorm, share its images.
_IN_USE: weakref.WeakValueDictionary[tuple[int, int], DecodedImages] = weakref.WeakValueDictionary()


def decode_if_small(
    file_names: Sequence[str], *, shorter_side: int, budget: float
) -> DecodedImages | None:
    """Decodes a set of images if it is small enough, and logs what was decided and why.

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
    processes = comm.get_local_size()
    threads = max(1, (os.cpu_count() or 1) // processes)
    sizes = _read_sizes(file_names[:: -(-len(file_names) // _SAMPLED)], threads)
    needed = _count_all(sizes, shorter_side) * len(file_names) / max(1, len(sizes))
    if needed * processes <= budget:
        sizes = _read_sizes(file_names, threads)
        needed = _count_all(sizes, shorter_side)
    copies = f" in each of {processes} processes" if processes > 1 else ""
    if needed * processes > budget:
        logger.info(
            f"Images are read from their files: decoded, they would take {needed / 1e9:.2f} GB of "
            f"memory{copies}, more than INPUT.PRETRAIN.MEMORY_GB {budget / 1e9:g}"
        )
        return None
    began = time.perf_counter()
    decoded = DecodedImages(
        sizes, shorter_side=shorter_side, num_threads=threads, progress=comm.is_main_process()
    )
    logger.info(
        f"{len(decoded):,} of {len(file_names):,} images are kept decoded in "
        f"{decoded.num_bytes / 1e9:.2f} GB of memory{copies} (decoded in "
        f"{time.perf_counter() - began:.1f} s, the shorter side no more than {shorter_side} "
        "pixels; INPUT.PRETRAIN.MEMORY_GB 0 reads files instead)"
    )
    _IN_USE[key] = decoded
    return decoded


def _read_sizes(file_names: Sequence[str], num_threads: int) -> dict[str, Size]:
    with ThreadPoolExecutor(num_threads) as pool:
        sizes = zip(file_names, pool.map(_read_size, file_names), strict=True)
        return {name: size for name, size in sizes if size is not None}


def _read_size(file_name: str) -> Size | None:
    try:
        with PathManager.open(file_name, "rb") as file, Image.open(file) as image:
            width, height = image.size
            return int(width), int(height)
    except Exception:  # as above
        return None


def _count_all(sizes: dict[str, Size], shorter_side: int) -> int:
    return sum(_count_bytes(size, shorter_side) for size in sizes.values())


def _count_bytes(size: Size, shorter_side: int) -> int:
    width, height = _find_kept_size(size, shorter_side)
    return width * height * _CHANNELS


def _find_kept_size(size: Size, shorter_side: int) -> Size:
    """Returns a size scaled down to a shorter side; the same for both orientations."""
    factor = min(1.0, shorter_side / min(size))
    return max(1, round(size[0] * factor)), max(1, round(size[1] * factor))
