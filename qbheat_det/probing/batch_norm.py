# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Recalibrates BatchNorm statistics on whole images; QB-Heat estimates them on quarters of images.

"Rethinking 'Batch' in BatchNorm", Wu & Johnson, arXiv:2105.07576, by its code in fvcore.
"""

import logging
import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog
from detectron2.modeling import Backbone
from detectron2.structures import ImageList
from fvcore.nn.precise_bn import BN_MODULE_TYPES, update_bn_stats
from torch import Tensor

from qbheat_det.core.errors import UserError
from qbheat_det.data import (
    ImageBatches,
    build_mapper,
    cut,
    join_messages,
    raise_first,
    undisturbed,
)
from qbheat_det.modeling.image_model import normalise_pixels

logger = logging.getLogger(__name__)


def recalibrate_bn(
    backbone: Backbone,
    images: Sequence[Tensor],
    *,
    pixel_mean: Sequence[float],
    pixel_std: Sequence[float],
    batch_size: int = 32,
) -> int:
    """Sets the statistics of a backbone's BatchNorms to those over all positions of ``images``.

    These are (3, H, W) each, pixels as a dataset mapper gives them. Layers normalise by the batch
    meanwhile, as in training. Only images of one size share a batch, so that none is padded. Frozen
    BatchNorms do not change. Returns the number of BatchNorms.
    """
    if not images:
        raise UserError("BatchNorm is recalibrated on images, and there are none")
    norms = [module for module in backbone.modules() if isinstance(module, BN_MODULE_TYPES)]
    batches = list(_batches_of_one_size(images, batch_size))
    device = next(backbone.parameters()).device

    def normalise(batch: list[Tensor]) -> Tensor:
        normalised = [normalise_pixels(image.to(device), pixel_mean, pixel_std) for image in batch]
        return ImageList.from_tensors(normalised, backbone.size_divisibility).tensor

    with undisturbed(backbone):
        for norm in norms:
            norm.train()
        update_bn_stats(backbone, map(normalise, batches), num_iters=len(batches))
    for norm in norms:  # a difference of two means, in which rounding can go below zero
        norm.running_var.clamp_(min=0)
    return len(norms)


def training_records(cfg: CfgNode) -> list[dict[str, Any]]:
    """Returns the records of ``DATASETS.TRAIN``, or raises a ``UserError``."""
    names = list(cfg.DATASETS.TRAIN)
    unknown = [name for name in names if name not in DatasetCatalog]
    if unknown or not names:
        raise UserError(
            f"DATASETS.TRAIN is {names}, of which {unknown} are not registered: name a folder with "
            "--images"
        )
    return [record for name in names for record in DatasetCatalog.get(name)]


def read_whole_images(
    cfg: CfgNode, records: Sequence[dict[str, Any]], num_images: int
) -> list[Tensor]:
    """Returns images (3, H, W), in pixels, as the config's model would see them in evaluation.

    Always the same random ones of the ``records``; all where there are fewer. What cannot be read
    is left out and named in the log; a ``UserError`` if none can.
    """
    chosen = random.Random(0).sample(list(records), min(num_images, len(records)))
    mapper = build_mapper(cfg, is_train=False)
    workers = cfg.DATALOADER.NUM_WORKERS
    batches = ImageBatches(chosen, mapper=mapper, num_workers=workers, shared=False)
    images = [entry["image"] for batch in batches for entry in batch]
    skipped = list(batches.skipped.values())
    if not images:
        raise_first(skipped)
    if skipped:
        logger.warning(f"Left out, {len(skipped):,} in all: {join_messages(skipped)}")
    return images


def _batches_of_one_size(images: Sequence[Tensor], batch_size: int) -> Iterator[list[Tensor]]:
    by_size: dict[torch.Size, list[Tensor]] = {}
    for image in images:
        by_size.setdefault(image.shape, []).append(image)
    for group in by_size.values():
        yield from cut(group, -(-len(group) // batch_size))  # about equal, so that none is tiny
