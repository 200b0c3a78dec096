# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The speed of a loader alone, and the waiting that it predicts."""

import time
from typing import Any

import pytest

from qbheat_det.data import TrainStream
from qbheat_det.engine.loader_speed import LoaderSpeed, measure_loader


def slow(record: dict[str, Any]) -> dict[str, Any]:
    time.sleep(0.004)
    return dict(record)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_is_as_fast_as_its_mapper_and_its_workers_allow(workers: int) -> None:
    records = [{"file_name": str(i), "image_id": i} for i in range(8)]
    stream = TrainStream(records, mapper=slow, batch_size=2, num_workers=workers)
    speed = measure_loader(stream, seconds=0.3)
    assert speed.num_workers == workers
    assert speed.batch_seconds == pytest.approx(2 / speed.images_per_second)
    # 250 a second and worker at most; other work on the machine only slows it down.
    assert 10 < speed.images_per_second < 260 * max(1, workers)


def test_a_step_waits_for_what_its_loader_takes_longer() -> None:
    alone, beside = LoaderSpeed(10, 0.2, 0), LoaderSpeed(10, 0.2, 1)
    assert alone.share_waited(0.2) == pytest.approx(0.5)  # one after the other
    assert beside.share_waited(0.2) == 0.0
    assert beside.share_waited(0.15) == pytest.approx(0.25)
    assert beside.share_waited(1.0) == 0.0
