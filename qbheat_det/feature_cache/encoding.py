# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Encodes images in batches, and returns the views that a store keeps."""

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
    """Encodes outputs of a mapper to views, in batches of images of equal size.

    Args:
        entries: outputs of a mapper. Errors and None are returned unchanged.
        encode: returns the outputs (N, …) by name for N entries whose images have equal size.
        at_once: largest batch size N.
        is_exact: use batches of exactly ``at_once`` entries, because rounding depends on the batch
            size. Entries are repeated to fill a batch. If the images have different sizes, this has
            no effect, and batches are about equally large.
    """
    views: list[Stored] = []
    by_size: dict[tuple[int, ...], list[int]] = {}
    for index, entry in enumerate(entries):
        if isinstance(entry, dict):
            views.append(None)  # replaced below
            by_size.setdefault(tuple(entry["image"].shape), []).append(index)
        else:
            views.append(entry)
    repeats = is_exact and len(by_size) == 1
    for indices in by_size.values():
        num_batches = -(-len(indices) // at_once)
        for part in cut(indices, num_batches):
            images: list[Any] = [entries[index] for index in part]
            batch_size = at_once if repeats else len(images)
            batch = list(islice(cycle(images), batch_size))
            outputs = {name: value.float().cpu() for name, value in encode(batch).items()}
            for position, index in enumerate(part):
                features = {name: value[position] for name, value in outputs.items()}
                views[index] = make_view(images[position], features)
    return views


def make_view(entry: Mapping[str, Any], features: dict[str, Tensor]) -> View:
    """Builds a view from an output of a mapper, and the encoder's outputs for this image."""
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
