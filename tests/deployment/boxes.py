# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Deployed models, random images for them, and the comparison of results."""

from typing import Any

import torch
from torch import nn
from torch.testing import assert_close

import qbheat_det


def deploy(model: nn.Module, **settings: Any) -> Any:
    """As the package, with the settings of this process's memory left alone."""
    return qbheat_det.deploy(model, keep_memory=False, **settings)


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
