# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Figures of datasets against hand arithmetic, the network's input against Detectron2's resize."""

from typing import Any

import numpy as np
import pytest
from detectron2.data import transforms as T
from detectron2.structures import BoxMode

from qbheat_det.analysis.dataset_charts import plot_counts, plot_distribution
from qbheat_det.analysis.dataset_statistics import DatasetStatistics

Record = dict[str, Any]


def box(*numbers: float, class_index: int = 0, **fields: object) -> Record:
    return {
        "bbox": list(numbers),
        "bbox_mode": BoxMode.XYWH_ABS,
        "category_id": class_index,
        **fields,
    }


def record(width: int, height: int, *annotations: Record) -> Record:
    return {"file_name": "a", "width": width, "height": height, "annotations": list(annotations)}


RECORDS = [
    record(
        200,
        100,
        box(0, 0, 20, 5),
        box(1, 1, 31, 31, class_index=1),
        box(10, 20, 42, 52, bbox_mode=BoxMode.XYXY_ABS),
        box(0, 0, 150, 100, iscrowd=1),
        box(3, 3, 0, 7),
    ),
    record(64, 64),
    {"file_name": "b", "width": 100, "height": 400},
    record(100, 400, box(0, 0, 96, 96, class_index=1), box(0, 0, 1, 400, class_index=1)),
]


def test_counts_are_those_of_the_records() -> None:
    found = DatasetStatistics.from_records(RECORDS, ["cat", "dog", "cow"])
    assert (found.num_images, found.num_boxes, found.num_crowds) == (4, 5, 1)
    assert found.num_images_without_boxes == 2
    assert found.boxes_per_image.tolist() == [3, 0, 0, 2]
    assert found.boxes_per_class.tolist() == [2, 3, 0]
    assert found.images_per_class.tolist() == [1, 2, 0]
    assert found.boxes[2].tolist() == [10, 20, 32, 32]


def test_sizes_are_measured_in_pixels_and_in_shares_of_the_image() -> None:
    found = DatasetStatistics.from_records(RECORDS, ["cat", "dog", "cow"])
    np.testing.assert_allclose(found.sides, [10, 31, 32, 96, 20])
    np.testing.assert_allclose(found.relative_sides[[0, 3]], [10 / 20000**0.5, 96 / 200])
    np.testing.assert_allclose(found.aspect_ratios, [4, 1, 1, 1, 1 / 400])
    assert found.count_sizes() == (3, 1, 1)  # 32 is medium and 96 is large, as in COCO


@pytest.mark.parametrize(("min_size", "max_size"), [(50, 1000), (80, 90), (300, 333), (0, 0)])
def test_the_networks_input_is_that_of_detectron2s_resize(min_size: int, max_size: int) -> None:
    found = DatasetStatistics.from_records(RECORDS, ["cat", "dog", "cow"])
    expected = []
    for (x, y, w, h), image in zip(found.boxes, found.image_of, strict=True):
        width, height = found.image_sizes[image].astype(int)
        resize = T.ResizeShortestEdge(min_size, max_size)
        transform = resize.get_transform(np.zeros((height, width, 3), dtype=np.uint8))
        x0, y0, x1, y1 = transform.apply_box(np.array([[x, y, x + w, y + h]]))[0]
        expected.append(min(x1 - x0, y1 - y0))
    # Detectron2 rounds the size of an image to whole pixels.
    np.testing.assert_allclose(
        found.short_sides_at_input(min_size, max_size), expected, rtol=1 / 40
    )


def test_nothing_is_counted_without_an_error() -> None:
    found = DatasetStatistics.from_records([], [])
    assert (found.num_images, found.num_boxes, found.count_sizes()) == (0, 0, (0, 0, 0))
    assert len(found.relative_sides) == len(found.short_sides_at_input(800, 1333)) == 0
    assert found.images_per_class.tolist() == []


def test_charts_name_their_series_and_show_every_count() -> None:
    svg = plot_counts({"train": {"fish": 1234, "$ray$": 0}, "val": {"fish": 5}}).decode()
    for text in ("train", "val", "fish", "1,234"):
        assert f"<!-- {text} -->" in svg or f"<!--  {text} -->" in svg, text
    long = "a name of a class that goes on and on to its side"
    svg = plot_counts({"all": {f"{long} left": 1, f"{long} right": 2}}).decode()
    assert "side left -->" in svg  # names lose their middle, since the ends differ
    assert "side right -->" in svg
    values = {"train": [1.0, 10.0, 1000.0], "val": [5.0]}
    assert b"<!-- pixels -->" in plot_distribution(values, label="pixels", log=True)
    assert plot_distribution({"one": [7.0, 7.0]}, label="x").startswith(b"<?xml")
