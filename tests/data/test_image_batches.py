# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Batches of whole images, the views that they are seen from, and what cannot be read."""

from typing import Any

import pytest
import torch

from qbheat_det.data import DataError, ImageBatches, with_views
from qbheat_det.modeling.pretrain import QUADRANTS_OF


class Plain:
    """A mapper that fails on some images."""

    def __init__(self, *broken: int) -> None:
        self.broken = broken

    def __call__(self, record: dict[str, Any]) -> dict[str, Any] | DataError:
        number = record["image_id"]
        if number in self.broken:
            return DataError("unreadable image", f"image '{number}'", "no image")
        return {**record, "image": torch.full((3, 2, 2), number)}


def numbers(batches: ImageBatches) -> list[list[int]]:
    return [[entry["image_id"] for entry in batch] for batch in batches]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_keep_the_order_and_leave_broken_images_out_every_time(num_workers: int) -> None:
    records = [{"image_id": i} for i in range(7)]
    mapper = Plain(1, 4, 5)
    batches = ImageBatches(records, mapper=mapper, batch_size=2, num_workers=num_workers)
    assert len(batches) == 4
    for _ in range(2):
        assert numbers(batches) == [[0], [2, 3], [6]]  # the third batch was broken as a whole
        assert sorted(batches.skipped) == ["image '1'", "image '4'", "image '5'"]


@pytest.mark.parametrize("memory_gb", [0.0, 1.0])
def test_what_workers_send_can_be_kept_without_an_open_file_each(memory_gb: float) -> None:
    records = [{"image_id": i} for i in range(5)]
    batches = ImageBatches(records, mapper=Plain(), num_workers=1, memory_gb=memory_gb)
    kept = [entry["image"] for batch in batches for entry in batch]
    assert [int(image[0, 0, 0]) for image in kept] == list(range(5))
    assert not any(image.is_shared() for image in kept)


def test_images_that_fit_in_memory_are_read_once_and_others_every_time() -> None:
    read: list[int] = []

    class Counting(Plain):
        def __call__(self, record: dict[str, Any]) -> dict[str, Any] | DataError:
            read.append(record["image_id"])
            return super().__call__(record)

    records = [{"image_id": i} for i in range(5)]  # 96 bytes each, 192 a batch
    for memory_gb, passes in ((600e-9, 1), (500e-9, 2)):
        read.clear()
        batches = ImageBatches(records, mapper=Counting(3), batch_size=2, memory_gb=memory_gb)
        assert next(iter(batches))[0]["image_id"] == 0  # a pass that is broken off keeps nothing
        read.clear()
        assert numbers(batches) == numbers(batches) == [[0, 1], [2], [4]]
        assert read == passes * [0, 1, 2, 3, 4]
        assert list(batches.skipped) == ["image '3'"]


def test_every_image_is_seen_from_a_corner_in_turn_and_from_the_centre() -> None:
    records = [{"image_id": i} for i in range(6)]
    seen = with_views(records, [QUADRANTS_OF["corner"], QUADRANTS_OF["centre"]])
    assert [entry["image_id"] for entry in seen] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    corners = ["top_left", "top_right", "bottom_left", "bottom_right"]
    assert [entry["place"] for entry in seen[::2]] == [*corners, *corners[:2]]
    assert {entry["place"] for entry in seen[1::2]} == {"centre"}
    assert records == [{"image_id": i} for i in range(6)]
