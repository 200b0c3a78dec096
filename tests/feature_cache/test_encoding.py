# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Views that are encoded in batches."""

import pytest
import torch

from qbheat_det.data import DataError
from qbheat_det.feature_cache.encoding import encode_images
from qbheat_det.feature_cache.store import View


@pytest.mark.parametrize(
    ("count", "at_once", "is_exact", "sizes"),
    [
        (32, 12, False, [10, 11, 11]),
        (32, 12, True, [12, 12, 12]),
        (5, 8, False, [5]),
        (5, 8, True, [8]),
        (3, 1, True, [1, 1, 1]),
    ],
)
def test_views_are_cut_evenly_or_repeated_to_fill_batches(count, at_once, is_exact, sizes):
    batch_sizes = []

    def encode(batch):
        batch_sizes.append(len(batch))
        return {"s16": torch.stack([e["image"].float().mean().view(1, 1, 1) for e in batch])}

    error = DataError("unreadable image", "image 'a.jpg'", "it is a text")
    entries = [{"image": torch.full((3, 8, 8), i, dtype=torch.uint8)} for i in range(count)]
    views = encode_images([error, *entries, None], encode, at_once=at_once, is_exact=is_exact)
    assert batch_sizes == sizes
    assert (views[0], views[-1]) == (error, None)
    for number, view in enumerate(views[1:-1]):
        assert isinstance(view, View)
        torch.testing.assert_close(view.features["s16"], torch.full((1, 1, 1), float(number)))
