# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Views of many kinds, and stores that other processes write, for the tests of cached features."""

import multiprocessing
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from qbheat_det.data import DataError, FixedViews, number_records
from qbheat_det.data.feature_store import FeatureStore, Stored, View
from qbheat_det.engine.feature_build import AllViews, CachedSet, ViewEncoder
from qbheat_det.engine.feature_build import fill as build

NUM_VIEWS = 70  # two files of 32 views and a short one
# Forked, as loading workers are: a new interpreter would import PyTorch for seconds.
FORK = multiprocessing.get_context("fork")


def sample_view(index: int) -> View | DataError | None:
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


def sample_views(indices: Sequence[int] = range(NUM_VIEWS)) -> list[View | DataError | None]:
    return [sample_view(index) for index in indices]


def fill(
    store: FeatureStore, before_write: Callable[[int], object] = lambda chunk: None
) -> list[int]:
    """Writes what is missing, as a run does; returns which chunks were.

    Args:
        store: of ``make_store``.
        before_write: is called with each chunk once it is claimed.
    """
    written, write = [], store.write

    def write_and_note(chunk: int, views: Sequence[Stored]) -> None:
        before_write(chunk)
        write(chunk, views)
        written.append(chunk)

    records = number_records([{"index": index} for index in range(NUM_VIEWS)])
    views = AllViews(records, FixedViews(lambda record: sample_view(record["index"]), count=1))  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "write", write_and_note)
        # The views are encoded already.
        build(CachedSet("Encoding", views, store, cast(ViewEncoder, list)), num_workers=0)
    return written


def make_store(folder: Path, dtype: torch.dtype = torch.float32) -> FeatureStore:
    return FeatureStore(folder / "cache", NUM_VIEWS, dtype=dtype)


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


def start(work: Callable[..., None], *arguments: Any) -> BaseProcess:
    process = FORK.Process(target=work, args=arguments, daemon=True)
    process.start()
    return process


def finish(process: BaseProcess) -> None:
    """Waits until a process has ended well."""
    process.join(60)
    assert process.exitcode == 0
