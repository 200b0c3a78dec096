# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Classifies image files with a trained classifier."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from detectron2.config import CfgNode
from torch import nn
from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

from qbheat_det.data import MAPPERS_OF_CLASSES, ImageBatches, build_mapper

from .media import MediaFile

_TOP_CLASSES = 5
_BATCH_SIZE = 16  # small, so that the bar moves
_DELAY = 2.0  # seconds without a bar


@dataclass
class ClassifiedFiles:
    """Predicted classes of files.

    Attributes:
        results: for each image, in order, "file_name" and "classes": the likeliest first, each
            with "name" and "score" in [0, 1].
        skipped: path and reason of what could not be classified.
    """

    results: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)


def is_classifier(cfg: CfgNode) -> bool:
    """Whether the config is that of a classifier of images."""
    return cfg.INPUT.DATASET_MAPPER_NAME in MAPPERS_OF_CLASSES


@torch.no_grad()
def classify_files(model: nn.Module, cfg: CfgNode, media: Sequence[MediaFile]) -> ClassifiedFiles:
    """Classifies images, cropped as in evaluation; videos are skipped.

    Args:
        model: with its weights; from a batch of dicts to "scores" (K,) of each image.
        cfg: of the model; ``MODEL.CLASS_NAMES`` is read, of which there may be none.
        media: files, of any number.
    """
    videos = [str(file.path) for file in media if file.is_video]
    found = ClassifiedFiles(skipped=[(path, "a classifier takes no videos") for path in videos])
    images = [file for file in media if not file.is_video]
    batches = ImageBatches(
        [{"file_name": str(file.path), "image_id": i} for i, file in enumerate(images)],
        mapper=build_mapper(cfg, is_train=False),
        batch_size=_BATCH_SIZE,
        shared=False,
    )
    names = cfg.MODEL.CLASS_NAMES
    model.eval()
    with tqdm(total=len(images), unit="image", desc="classifying", delay=_DELAY) as bar:
        for batch in batches:
            scores = torch.stack([output["scores"] for output in model(batch)]).float()
            for entry, row in zip(batch, scores.cpu(), strict=True):
                file_name = images[entry["image_id"]].name
                likeliest = name_likeliest(row.numpy(), names)
                found.results.append({"file_name": file_name, "classes": likeliest})
            bar.update(len(batch))
    for file in images:
        fault = batches.skipped.get(f"image {str(file.path)!r}")
        if fault is not None:
            found.skipped.append((str(file.path), fault.reason))
    return found


def name_likeliest(
    scores: npt.NDArray[np.floating[Any]], names: Sequence[str]
) -> list[dict[str, Any]]:
    """Returns "name" and "score" of the five likeliest classes, the likeliest first.

    Args:
        scores: (K,).
        names: of the K classes; where there are none, their numbers replace them.
    """
    order = np.argsort(-scores, kind="stable")[:_TOP_CLASSES].tolist()
    return [
        {"name": names[index] if names else str(index), "score": float(scores[index])}
        for index in order
    ]
