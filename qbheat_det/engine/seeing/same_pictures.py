# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The same pictures for all subjects, cropped to squares, as each one's encoder takes them.

Subjects are compared on the images of the first that has any here: a detector's own data beside a
classifier's would compare data.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from detectron2.config import CfgNode
from detectron2.modeling import FPN, Backbone
from torch import Tensor, nn

from qbheat_det.data import MAPPERS_OF_IMAGES, build_mapper
from qbheat_det.engine.spread_images import read_spread

from .refusal import NothingToSee
from .subject import Kind, Subject

_BATCH_SIZE = 32
_KINDS: dict[Kind, str] = {
    "pretraining": "pre-training",
    "detector": "detection",
    "classifier": "classification",
}

Entries = list[dict[str, Any]]


def pick_files(subjects: Sequence[Subject], number: int, images: Path | None) -> list[str]:
    """Returns so many image files, spread over a folder or over the first subject's data.

    Raises:
        NothingToSee: no folder is given, and no subject has data here.
        UserError: the folder holds no image that can be read.
    """
    reasons = []
    for subject in subjects:
        try:
            entries = subject.load_entries(number, images)
        except NothingToSee as reason:
            reasons.append(str(reason))
        else:
            return [str(entry["file_name"]) for entry in entries]
    raise NothingToSee("; ".join(dict.fromkeys(reasons)))


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


def name_kinds(subjects: Sequence[Subject], seen: Kind) -> list[str]:
    """Returns the labels of subjects, with what they are for, of each kind but the one seen."""
    others: dict[Kind, list[str]] = {}
    for subject in subjects:
        if subject.kind != seen:
            others.setdefault(subject.kind, []).append(f"'{subject.label}'")
    return [f"{', '.join(labels)} ({_KINDS[kind]})" for kind, labels in others.items()]


def count_batches(entries: Entries) -> int:
    """Returns how many batches ``batch_images`` makes of them."""
    return -(-len(entries) // _BATCH_SIZE)


def find_encoder(model: nn.Module) -> Backbone:
    """Returns the backbone of any model; of a feature pyramid, what is below it.

    Raises:
        NothingToSee: the model has none.
    """
    backbone = getattr(model, "backbone", None)
    if not isinstance(backbone, Backbone):
        raise NothingToSee(f"a {type(model).__name__} has no backbone")
    return backbone.bottom_up if isinstance(backbone, FPN) else backbone
