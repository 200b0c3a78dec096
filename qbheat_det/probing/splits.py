# Copyright (c) qbheat_det contributors. Apache-2.0.
"""A part of the training images set aside, on which the settings of a probe are chosen."""

import random

import torch
from torch import Tensor


def split_by_class(labels: Tensor, *, share: float = 0.2, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Divides images at random, each class in the same proportion.

    Of a class of at least two images, at least one is on either side; a class of one image is not
    set aside, or nothing could be learned of it.

    Args:
        labels: (N,).
        share: of each class that is set aside, rounded.
        seed: of the draw; equal seeds and labels give equal parts.

    Returns:
        The places of the images that remain and of those set aside, each rising.
    """
    draw = random.Random(seed)
    aside: list[int] = []
    for label in labels.unique().tolist():
        places = (labels == label).nonzero()[:, 0].tolist()
        if len(places) > 1:
            wanted = min(max(1, round(share * len(places))), len(places) - 1)
            aside += draw.sample(places, wanted)
    is_aside = torch.zeros(len(labels), dtype=torch.bool)
    is_aside[aside] = True
    return (~is_aside).nonzero()[:, 0], is_aside.nonzero()[:, 0]
