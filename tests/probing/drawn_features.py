# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Features of classes that lie apart, drawn."""

import torch
from torch import Tensor


def draw_classes(
    num_images: int, *, num_features: int, num_classes: int, spread: float = 0.7, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Returns features (N, D) around one centre for each class, and labels (N,) in turn."""
    draw = torch.Generator().manual_seed(seed)
    centres = torch.randn(num_classes, num_features, generator=draw)
    labels = torch.arange(num_images) % num_classes
    noise = torch.randn(num_images, num_features, generator=draw)
    return centres[labels] + spread * noise, labels
