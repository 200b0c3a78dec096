# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Views encoded in batches: cut evenly, or filled up where the last bits are wanted."""

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from qbheat_det.data import DataError
from qbheat_det.data.feature_store import View
from qbheat_det.engine.feature_build import ViewEncoder
from qbheat_det.modeling.backbone import CachedBackbone


class CountingBackbone:
    """Gives the mean of each image, and remembers the sizes of the batches."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def encode(self, model: nn.Module, batch: list[dict[str, Any]]) -> dict[str, Tensor]:
        self.sizes.append(len(batch))
        return {
            "s16": torch.stack([entry["image"].float().mean().view(1, 1, 1) for entry in batch])
        }


@pytest.mark.parametrize(
    ("count", "at_once", "is_exact", "sizes"),
    [
        (32, 24, False, [16, 16]),
        (32, 24, True, [24, 24]),
        (32, 12, False, [10, 11, 11]),
        (32, 12, True, [12, 12, 12]),
        (5, 8, False, [5]),
        (5, 8, True, [8]),
        (3, 1, True, [1, 1, 1]),
    ],
)
def test_a_file_of_views_is_cut_evenly_or_filled_up(
    count: int, at_once: int, is_exact: bool, sizes: list[int]
) -> None:
    backbone = CountingBackbone()
    encoder = ViewEncoder(
        nn.Identity(),
        cast(CachedBackbone, backbone),
        at_once=at_once,
        is_train=True,
        is_exact=is_exact,
    )
    error = DataError("unreadable image", "image 'a.jpg'", "it is a text")
    entries = [{"image": torch.full((3, 8, 8), i, dtype=torch.uint8)} for i in range(count)]
    views = encoder([error, *entries, None])
    assert backbone.sizes == sizes
    assert (views[0], views[-1]) == (error, None)
    for number, view in enumerate(views[1:-1]):
        assert isinstance(view, View)
        torch.testing.assert_close(view.features["s16"], torch.full((1, 1, 1), float(number)))
