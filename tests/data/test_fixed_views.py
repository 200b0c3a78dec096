# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Fixed views: K of each image, drawn once, chosen by the stream, and the same from a cache."""

import itertools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from detectron2.structures import Boxes, Instances

from qbheat_det.data import DataError, FixedViews, TrainStream, number_records, seed_place
from qbheat_det.data.feature_store import FeatureStore
from qbheat_det.data.mappers import VIEW_ROW, CachedViews
from qbheat_det.data.seeding import IMAGE, VIEW
from qbheat_det.engine.feature_build import make_view

RECORDS = number_records([{"file_name": f"{i}.jpg", "image_id": 10 + i} for i in range(9)])
COUNT = 3


def augment(record: dict[str, Any]) -> dict[str, Any] | DataError | None:
    """Draws an image and boxes from all generators; leaves out two images, one with a reason."""
    assert VIEW_ROW not in record
    if record["image_id"] == 12:
        return DataError("unreadable image", record["file_name"], "it is a text")
    if record["image_id"] == 15:
        return None
    height, width, boxes = random.randint(8, 20), int(np.random.randint(8, 20)), torch.rand(2, 4)
    instances = Instances((height, width))
    instances.gt_boxes = Boxes(boxes * 8)
    instances.gt_classes = torch.randint(5, (2,))
    image = torch.randint(256, (3, height, width), dtype=torch.uint8)
    return {**record, "image": image, "instances": instances}


def encode(entry: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {"s1": entry["image"].float(), "mean": entry["image"].float().mean((1, 2))}


def make_stream(mapper: Any, seed: int = 4, workers: int = 0) -> TrainStream:
    return TrainStream(RECORDS, mapper=mapper, batch_size=4, seed=seed, num_workers=workers)


def take(stream: TrainStream, steps: int) -> list[dict[str, Any]]:
    return [entry for batch in itertools.islice(iter(stream), steps) for entry in batch]


def test_the_stream_chooses_by_position_and_the_views_seed_draws() -> None:
    stream = make_stream(FixedViews(augment, COUNT, seed=7))
    positions = itertools.chain.from_iterable(stream.batches())
    for entry, (position, row) in zip(take(stream, 10), positions, strict=False):
        if row in (2, 5):  # another image takes its place
            continue
        seed_place(4, IMAGE, position)
        number = int(torch.randint(COUNT, ()))
        seed_place(7, VIEW, row, number)
        expected = augment({key: RECORDS[row][key] for key in ("file_name", "image_id")})
        assert isinstance(expected, dict)
        torch.testing.assert_close(entry["image"], expected["image"])
        # Drawing a view leaves the generators alone.
        seed_place(4, IMAGE, position)
        stream.mapper.view(RECORDS[row], number)
        assert int(torch.randint(COUNT, ())) == number


def make_cache(folder: Path, views: FixedViews) -> FeatureStore:
    store = FeatureStore(folder / "cache", len(RECORDS) * views.count, dtype=torch.float32)
    for chunk in store.missing():
        mapped = [
            views.view(RECORDS[index // views.count], index % views.count)
            for index in store.views_of(chunk)
        ]
        store.write(chunk, [make_view(m, encode(m)) if isinstance(m, dict) else m for m in mapped])
    return store


@pytest.mark.parametrize(("count", "workers"), [(1, 0), (COUNT, 2)])
def test_a_stream_from_the_cache_is_that_of_the_views(
    tmp_path: Path, count: int, workers: int
) -> None:
    views = FixedViews(augment, count)
    store = make_cache(tmp_path, views)
    online, cached = make_stream(views), make_stream(CachedViews(store, count), workers=workers)
    for wanted, found in zip(take(online, 12), take(cached, 12), strict=True):
        assert (found["file_name"], found["image_id"]) == (wanted["file_name"], wanted["image_id"])
        torch.testing.assert_close(found["features"], encode(wanted), rtol=0, atol=0)
        assert found["image"].shape == wanted["image"].shape
        assert found["image"].untyped_storage().nbytes() == 1 or workers
        assert found["instances"].image_size == wanted["instances"].image_size
        for field in ("gt_boxes", "gt_classes"):
            fields = [getattr(entry["instances"], field) for entry in (found, wanted)]
            tensors = [field.tensor if isinstance(field, Boxes) else field for field in fields]
            torch.testing.assert_close(*tensors, rtol=0, atol=0)
    assert online.skipped == cached.skipped
    assert online.skipped  # of image 12
