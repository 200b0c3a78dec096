# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The same pictures for all subjects, cropped to squares, as each one's encoder takes them.

Subjects are compared on the images of the first that is looked at, or of another that has any here:
a detector's own data beside a classifier's would compare data.
"""

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from detectron2.config import CfgNode
from detectron2.modeling import Backbone
from torch import Tensor, nn

from qbheat_det.core.errors import UserError
from qbheat_det.data import MAPPERS_OF_IMAGES, build_mapper, load_image_folders
from qbheat_det.engine.sample_images import SpreadEntries, read_spread
from qbheat_det.modeling.contracts import get_backbone, get_encoder

from .refusal import NothingToSee
from .side_by_side import FaultOfAll
from .subject import Subject

logger = logging.getLogger(__name__)

_BATCH_SIZE = 32
_NAMED = 3  # files that could not be read

Entries = list[dict[str, Any]]


class SamePictures:
    """Image files that all subjects are looked at with, picked when the first one wants them."""

    def __init__(self, subjects: Sequence[Subject], number: int, images: Path | None) -> None:
        """
        Args:
            subjects: all that may be looked at.
            number: how many files.
            images: folder to take them from; None for a subject's own data.

        Raises:
            FaultOfAll: the folder does not exist or holds no image.
        """
        self._subjects = subjects
        self._number = number
        self._images = images
        self._entries = SpreadEntries()
        if images is not None:
            try:
                load_image_folders([images])
            except UserError as error:
                raise FaultOfAll(str(error)) from error

    @property
    def files(self) -> list[str]:
        """Those that were picked."""
        return [str(entry["file_name"]) for entry in self._entries]

    def pick(self, subject: Subject) -> list[str]:
        """Returns the files, spread over the folder or over the data of the first who asks.

        Raises:
            NothingToSee: no folder is given, and no subject has data here.
            FaultOfAll: the folder holds no image that can be read.
        """
        if not self._entries:
            self._entries = self._read([subject, *self._subjects])
            if self._entries.unreadable:
                logger.warning("%s", *self.explain())
        return self.files

    def explain(self) -> list[str]:
        """Returns the paragraph on pictures that could not be read, if there were any."""
        broken = [Path(name).name for name in self._entries.unreadable]
        if not broken:
            return []
        more = ", …" if len(broken) > _NAMED else ""
        return [
            f"{len(broken)} of the pictures that were chosen could not be read; the next ones took "
            f"their places, as far as there are any: {', '.join(broken[:_NAMED])}{more}."
        ]

    def _read(self, subjects: Sequence[Subject]) -> SpreadEntries:
        reasons = []
        for subject in subjects:
            try:
                entries = subject.load_entries(self._number, self._images)
            except (NothingToSee, UserError) as reason:  # another one may have them
                reasons.append(str(reason))
            else:
                return cast(SpreadEntries, entries)  # as ``read_spread`` made them
        sentence = "; ".join(dict.fromkeys(reasons))
        raise NothingToSee(sentence) if self._images is None else FaultOfAll(sentence)


def find_sizes(subjects: Sequence[Subject]) -> list[int]:
    """Returns the sides in pixels of what pre-trainings and classifiers take, in their order."""
    sizes = []
    for subject in subjects:
        try:
            if subject.kind != "detector":
                sizes.append(int(subject.cfg.INPUT.PRETRAIN.SIZE))
        except (NothingToSee, UserError):  # which is said where the subject is looked at
            continue
    return sizes


def crop_squares(cfg: CfgNode, file_names: Sequence[str], size: int | None = None) -> Entries:
    """Returns what the run's mapper makes of files in inference: "image" (3, S, S).

    A detector has no such mapper; of it, S x S is the middle of an image, as of pre-training.

    Args:
        cfg: of the run.
        file_names: of images that can be read.
        size: S; None for the run's ``INPUT.PRETRAIN.SIZE``.
    """
    cfg = cfg.clone()
    cfg.defrost()
    if cfg.INPUT.DATASET_MAPPER_NAME not in MAPPERS_OF_IMAGES:
        cfg.INPUT.DATASET_MAPPER_NAME = "pretrain"
    if size is not None:
        cfg.INPUT.PRETRAIN.SIZE = size
    records = [{"file_name": name} for name in file_names]
    return read_spread(records, build_mapper(cfg, is_train=False), len(records))


def batch_images(model: nn.Module, entries: Entries) -> Iterator[Tensor]:
    """Yields images (n, 3, S, S), on the model's device and normalised as it has them."""
    mean, deviation = (
        cast(Tensor, statistics).view(-1, 1, 1)
        for statistics in (model.pixel_mean, model.pixel_std)
    )
    for start in range(0, len(entries), _BATCH_SIZE):
        images = torch.stack([entry["image"] for entry in entries[start : start + _BATCH_SIZE]])
        yield (images.to(mean.device) - mean) / deviation


def count_batches(entries: Entries) -> int:
    """Returns how many batches ``batch_images`` makes of them."""
    return -(-len(entries) // _BATCH_SIZE)


def find_encoder(model: nn.Module) -> Backbone:
    """Returns the backbone of any model; of a feature pyramid, what is below it.

    Raises:
        NothingToSee: the model has none.
    """
    backbone = get_backbone(model)
    if backbone is None:
        raise NothingToSee(f"a {type(model).__name__} has no backbone")
    return get_encoder(backbone)
