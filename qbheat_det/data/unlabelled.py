# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Unlabelled images for semi-supervised detection.

Removes duplicates, and computes strongly augmented views (*strong views*) of the images.
"""

import functools
import hashlib
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog
from detectron2.utils import comm
from torch import Tensor
from torch.nn import functional as F
from torchvision.transforms import RandomErasing, v2

from qbheat_det.core.errors import UserError
from qbheat_det.core.image_files import find_elongation
from qbheat_det.core.text import one_line
from qbheat_det.modeling.contracts import STRONG

from .checks import DataError, join_messages
from .images import check_depth, read_image, run_threads
from .mappers import Mapper
from .mappers.crops import BLUR_SIGMA, JITTER, ColourChange

logger = logging.getLogger(__name__)
_GREY = 127
# Noise on cached features.
_DROPPED_CHANNELS = 0.2  # probability that a channel is set to zero
_ERASED_AREA = 0.2  # area of the erased rectangle, relative to the image
_GRID = (
    1000  # the rectangle is drawn on a grid of this height and width, which stands for the image
)


def build_strong_colours(pixel_format: str) -> ColourChange:
    """Returns a transform that randomly changes the colors of an image, blurs and erases it."""
    # The probabilities are from Soft Teacher (arXiv:2106.09018) and Unbiased Teacher.
    changes = [
        v2.RandomApply([v2.ColorJitter(*JITTER)], p=0.8),
        v2.RandomGrayscale(p=0.2),
        v2.RandomApply([v2.GaussianBlur(9, sigma=list(BLUR_SIGMA))], p=0.5),
        v2.RandomErasing(p=0.7, scale=(0.05, 0.2), value=_GREY),
        v2.RandomErasing(p=0.5, scale=(0.02, 0.1), value=_GREY),
    ]
    return ColourChange(v2.Compose(changes), pixel_format)


def add_noise(features: dict[str, Tensor]) -> dict[str, Tensor]:
    """Sets random channels and one random rectangle of each feature map (C, h, w) to zero.

    On average, a fifth of the channels are dropped, and the others are scaled up (dropout). The
    rectangle is a fifth of the area, at the same position of the image in all maps. Tensors of
    another number of dimensions, such as tokens, do not change.
    """
    grid = torch.empty(1, _GRID, _GRID, device="meta")
    top, left, height, width, _ = RandomErasing.get_params(
        grid, scale=(_ERASED_AREA, _ERASED_AREA), ratio=(0.5, 2.0), value=[0.0]
    )
    noisy = {}
    for name, values in features.items():
        if values.ndim == 3:
            values = F.dropout2d(values[None], _DROPPED_CHANNELS)[0].clone()
            num_rows, num_columns = values.shape[1:]
            # The rectangle in the map, rounded down.
            map_top = top * num_rows // _GRID
            map_bottom = (top + height) * num_rows // _GRID
            map_left = left * num_columns // _GRID
            map_right = (left + width) * num_columns // _GRID
            values[:, map_top:map_bottom, map_left:map_right] = 0
        noisy[name] = values
    return noisy


@dataclass(frozen=True)
class StrongViews:
    """A mapper that adds a strong view, with the key ``STRONG``, to the output of another mapper.

    Attributes:
        mapper: the other mapper.
        colours: strong augmentation of an image. Cached features get noise instead.
    """

    mapper: Mapper
    colours: ColourChange

    def __call__(self, dataset_dict: dict[str, Any]) -> dict[str, Any] | DataError | None:
        entry = self.mapper(dataset_dict)
        if not isinstance(entry, dict):
            return entry
        if entry.get("features"):
            return {**entry, STRONG: add_noise(entry["features"])}
        return {**entry, STRONG: self.colours(entry["image"])}


def build_strong_views(cfg: CfgNode, mapper: Mapper) -> StrongViews:
    """Builds a ``StrongViews``. Raises a ``UserError`` if a value of ``MODEL.SEMI`` is invalid."""
    keys = cfg.MODEL.SEMI
    if not 0 <= keys.BURN_IN < 1:
        raise UserError(f"MODEL.SEMI.BURN_IN is {keys.BURN_IN}, but must be from 0 to below 1")
    if keys.RATIO < 1 or not min(keys.WEIGHT, keys.TOP_RATIO) > 0:
        raise UserError(
            "MODEL.SEMI.RATIO must be at least 1; MODEL.SEMI.WEIGHT and TOP_RATIO must be positive"
        )
    return StrongViews(mapper, build_strong_colours(cfg.INPUT.FORMAT))


def load_unlabelled(cfg: CfgNode, labelled: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the records of ``DATASETS.UNLABELLED`` without duplicate and unreadable images.

    An image is a duplicate if it has the same pixels as an earlier image, or as an image in
    ``labelled`` or ``DATASETS.TEST``. File names do not matter.

    Raises:
        UserError: no image is left.
    """
    records = [record for name in cfg.DATASETS.UNLABELLED for record in DatasetCatalog.get(name)]
    kept: list[int] = []
    if comm.is_main_process():
        tests = [record for name in cfg.DATASETS.TEST for record in DatasetCatalog.get(name)]
        sets = {"labelled": labelled, "validation": tests, "unlabelled": records}
        kept = _find_new(sets, cfg.INPUT.MAX_SIZE_TRAIN)
    kept = comm.all_gather(kept)[0]
    if not kept:
        raise UserError(
            f"--unlabelled: none of the {len(records):,} images is left, as all are labelled, "
            "validation images, or unreadable"
        )
    return [records[i] for i in kept]


def _find_new(sets: Mapping[str, Sequence[dict[str, Any]]], longest: int) -> list[int]:
    """Returns the indices of the unlabelled images to use, and logs how many are left out.

    Args:
        sets: the records of the images, with the keys "labelled", "validation" and "unlabelled".
        longest: longest side of resized images, in pixels.
    """
    digests_of: dict[str, list[str | DataError]] = {}
    for name, records in sets.items():
        digests = run_threads(
            functools.partial(hash_pixels, longest=longest),
            [str(record["file_name"]) for record in records],
            f"Comparing {name} images",
            num_threads=os.cpu_count() or 1,
        )
        digests_of[name] = list(digests)
    set_of_digest: dict[str | DataError, str] = {}  # the first set that has the image
    for name in ("labelled", "validation"):
        for digest in digests_of[name]:
            set_of_digest[digest] = name
    kept = []
    errors = []
    counts = dict.fromkeys(sets, 0)
    for index, digest in enumerate(digests_of["unlabelled"]):
        if isinstance(digest, DataError):
            errors.append(digest)
        elif digest in set_of_digest:
            counts[set_of_digest[digest]] += 1
        else:
            set_of_digest[digest] = "unlabelled"
            kept.append(index)
    logger.info(
        f"{len(kept):,} of {len(digests_of['unlabelled']):,} unlabelled images are used: "
        f"{counts['labelled']:,} are labelled images, {counts['validation']:,} validation images, "
        f"{counts['unlabelled']:,} are duplicates, {len(errors):,} cannot be read"
    )
    if errors:
        logger.warning(f"Unlabelled images are left out: {join_messages(errors)}")
    return kept


def hash_pixels(path: str, longest: float) -> str | DataError:
    """Returns a digest of the size and the pixels of an upright image.

    Returns an error if the image cannot be read, or if its shorter side would be zero after it is
    resized to a longer side of ``longest`` pixels.
    """
    try:
        check_depth(path)
        pixels = read_image(path, "RGB")
    except (MemoryError, UserError):
        raise
    except Exception as error:  # the type depends on the format's decoder
        return DataError("unreadable image", f"image {path!r}", one_line(error))
    elongation = find_elongation(pixels.shape[:2], longest)
    if elongation:
        return DataError("elongated image", f"image {path!r}", elongation)
    digest = hashlib.blake2b(repr(pixels.shape).encode(), digest_size=16)
    digest.update(pixels.tobytes())
    return digest.hexdigest()
