# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Encodes images in batches, and returns the views that a store keeps."""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor

from qbheat_det.data import cut

from .store import VIEWS_PER_FILE, Mapped, Stored, View


def encode_images(
    entries: Sequence[Mapped],
    encode: Callable[[list[dict[str, Any]]], Mapping[str, Tensor]],
    *,
    at_once: int = VIEWS_PER_FILE,
    is_exact: bool = False,
) -> list[Stored]:
    """Runs an encoder on outputs of a mapper, in batches of images of equal size.

    Args:
        entries: outputs of a mapper. Errors and None are returned unchanged.
        encode: returns the outputs (N, …) by name for N entries whose images have equal size.
        at_once: largest batch size N.
        is_exact: whether to use batches of exactly ``at_once`` entries, because rounding depends on
            the batch size. Entries are repeated to fill a batch. If the images have different
            sizes, this has no effect, and batches are about equally large.

    Returns:
        A view for each entry, in the same order.
    """
    views: dict[int, Stored] = {}  # by index of the entry
    indices_by_size: dict[tuple[int, ...], list[int]] = {}
    for index, entry in enumerate(entries):
        if isinstance(entry, dict):
            size = tuple(entry["image"].shape)
            indices_by_size.setdefault(size, []).append(index)
        else:
            views[index] = entry
    fills_batches = is_exact and len(indices_by_size) == 1
    for indices in indices_by_size.values():
        num_batches = math.ceil(len(indices) / at_once)
        for batch_indices in cut(indices, num_batches):
            batch: list[Any] = [entries[index] for index in batch_indices]
            if fills_batches:
                batch = list(islice(cycle(batch), at_once))
            outputs = {name: value.float().cpu() for name, value in encode(batch).items()}
            for row, index in enumerate(batch_indices):
                features = {name: value[row] for name, value in outputs.items()}
                views[index] = make_view(batch[row], features)
    return [views[index] for index in range(len(entries))]


def make_view(entry: Mapping[str, Any], features: dict[str, Tensor]) -> View:
    """Builds a view from an output of a mapper, and the encoder's outputs for this image.

    "height" and "width" in ``entry`` are the size of the original image, before it was resized.
    """
    height, width = entry["image"].shape[-2:]
    truth: dict[str, Tensor] = {}
    if "instances" in entry:
        truth["gt_boxes"] = entry["instances"].gt_boxes.tensor.float()
        truth["gt_classes"] = entry["instances"].gt_classes.long()
    if "label" in entry:
        truth["label"] = torch.tensor(int(entry["label"]))
    full_size = None
    if "height" in entry:
        full_size = (int(entry["height"]), int(entry["width"]))
    return View(features, (int(height), int(width)), truth, full_size)
