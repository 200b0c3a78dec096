# Copyright (c) qbheat_det contributors. Apache-2.0.
"""A small set of images, decoded once and kept in memory, where forked workers share it.

An image keeps no more pixels than its smallest crop can use. Reading from files and from memory
choose the same crops.
"""

import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from detectron2.utils import comm
from detectron2.utils.file_io import PathManager
from PIL import Image
from tqdm import tqdm

from .images import ImageInMemory, open_image, resize

logger = logging.getLogger(__name__)

_SAMPLED = 64  # headers from which the size of a set is estimated


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
    budget /= comm.get_local_size()
    sampled = file_names[:: -(-len(file_names) // _SAMPLED)]
    needed = sum(_count_bytes(name, shorter_side) for name in sampled) / len(sampled)
    if needed * len(file_names) <= budget:
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
    except MemoryError:
        raise
    except Exception:  # what a broken file raises depends on its format's decoder
        return None
    width, height = _scale_down(full, shorter_side)
    if pixels.shape[:2] != (height, width):
        pixels = resize(pixels, height, width).permute(1, 2, 0).contiguous()
    return ImageInMemory(pixels, width=full[0], height=full[1])


def _count_bytes(file_name: str, shorter_side: int) -> int:
    """Returns what an image takes in memory, from its header; 0 if it cannot be read."""
    try:
        with PathManager.open(file_name, "rb") as file, Image.open(file) as image:
            width, height = _scale_down(image.size, shorter_side)
    except Exception:
        return 0
    return 3 * width * height


def _scale_down(size: tuple[int, int], shorter_side: int) -> tuple[int, int]:
    """Returns a size scaled down to a shorter side; the same for both orientations."""
    factor = min(1.0, shorter_side / min(size))
    return max(1, round(size[0] * factor)), max(1, round(size[1] * factor))
