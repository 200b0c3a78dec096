# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Views of many kinds, and a store of them, for the tests of cached features."""

from pathlib import Path

import torch

from qbheat_det.data import DataError, FixedViews, number_records
from qbheat_det.data.feature_store import FeatureStore, Stored, View
from qbheat_det.engine.feature_build import AllViews
from qbheat_det.engine.feature_build import fill as build

NUM_VIEWS = 70  # two files of 32 views and a short one


def sample_view(index: int) -> Stored:
    """A view, by its index alone: ragged sizes, some without boxes, some left out by a mapper."""
    if index % 13 == 5:
        return DataError("unreadable image", f"image 'görl {index}.jpg'", "it is a text")
    if index % 13 == 6:
        return None
    generator = torch.Generator().manual_seed(index)
    height, width, boxes = 2 + index % 3, 3 + index % 5, index % 4
    return View(
        features={
            "s16": torch.randn(4, height, width, generator=generator),
            "tokens": torch.randn(6, 5, generator=generator),
        },
        image_size=(16 * height - 3, 16 * width),
        ground_truth={
            "gt_boxes": torch.rand(boxes, 4, generator=generator) * 40,
            "gt_classes": torch.randint(9, (boxes,), generator=generator),
        },
    )


def make_store(folder: Path, dtype: torch.dtype = torch.float32) -> FeatureStore:
    return FeatureStore(folder / "cache", NUM_VIEWS, dtype=dtype)


def fill(store: FeatureStore) -> int:
    """Writes what is missing, as a run does, and returns how many files were."""
    written = 0

    def encode(views: list[Stored]) -> list[Stored]:  # they are encoded already
        nonlocal written
        written += 1
        return views

    records = number_records([{"index": index} for index in range(NUM_VIEWS)])
    views = AllViews(records, FixedViews(lambda record: sample_view(record["index"]), count=1))  # type: ignore[arg-type, return-value]
    build(store, views, encode, title="Encoding", num_workers=0)  # type: ignore[arg-type]
    return written


def check_content(store: FeatureStore, dtype: torch.dtype = torch.float32) -> None:
    """Asserts that every view of a store is that of ``sample_view``, rounded to its dtype."""
    for index in range(NUM_VIEWS):
        found, wanted = store.read(index), sample_view(index)
        if not isinstance(wanted, View):
            assert found == wanted
            continue
        assert isinstance(found, View)
        assert found.image_size == wanted.image_size
        rounded = {name: feature.to(dtype) for name, feature in wanted.features.items()}
        torch.testing.assert_close(found.features, rounded, rtol=0, atol=0)
        torch.testing.assert_close(found.ground_truth, wanted.ground_truth, rtol=0, atol=0)
