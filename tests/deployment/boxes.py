# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Random images for a detector, and the comparison of its results."""

from typing import Any

import torch
from torch.testing import assert_close


def entries(*sizes: tuple[int, int]) -> list[dict[str, Any]]:
    """Returns a batch of random images, the same each time."""
    generator = torch.Generator().manual_seed(1)
    return [
        {"image": torch.randint(256, (3, *size), generator=generator, dtype=torch.uint8)}
        for size in sizes
    ]


def assert_same_boxes(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Asserts that two batches of results agree, and are not empty."""
    for one, other in zip(found, expected, strict=True):
        a, b = one["instances"], other["instances"]
        assert len(b) > 0
        assert_close(a.pred_boxes.tensor, b.pred_boxes.tensor, rtol=0, atol=0.05)
        assert_close(a.scores, b.scores, rtol=0, atol=1e-4)
        assert_close(a.pred_classes, b.pred_classes)
