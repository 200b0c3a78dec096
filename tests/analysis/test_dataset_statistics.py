# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Statistics of datasets against arithmetic by hand, and against Detectron2's resize."""

from typing import Any

import numpy as np
import pytest
from detectron2.data import transforms as T
from detectron2.structures import BoxMode

from qbheat_det.analysis.dataset_report import plot_class_counts, plot_distribution
from qbheat_det.analysis.dataset_statistics import DatasetStatistics

Record = dict[str, Any]
NAMES = ["cat", "dog", "cow"]


def box(*numbers: float, class_index: int = 0, **fields: object) -> Record:
    return {
        "bbox": list(numbers),
        "bbox_mode": BoxMode.XYWH_ABS,
        "category_id": class_index,
        **fields,
    }


RECORDS = [
    {
        "width": 200,
        "height": 100,
        "annotations": [
            box(0, 0, 20, 5),
            box(1, 1, 31, 31, class_index=1),
            box(10, 20, 42, 52, bbox_mode=BoxMode.XYXY_ABS),
            box(0, 0, 150, 100, iscrowd=1),
            box(3, 3, 0, 7),
        ],
    },
    {"width": 64, "height": 64, "annotations": []},
    {"width": 100, "height": 400},
    {
        "width": 100,
        "height": 400,
        "annotations": [box(0, 0, 96, 96, class_index=1), box(0, 0, 1, 400, class_index=1)],
    },
]


def test_boxes_are_counted_and_measured() -> None:
    found = DatasetStatistics.from_records(RECORDS, NAMES)
    assert (len(found.image_sizes), len(found.boxes), found.num_crowds) == (4, 5, 1)
    assert found.boxes_per_image.tolist() == [3, 0, 0, 2]
    assert found.boxes_per_class.tolist() == [2, 3, 0]
    assert found.boxes[2].tolist() == [10, 20, 32, 32]
    np.testing.assert_allclose(found.sides, [10, 31, 32, 96, 20])
    np.testing.assert_allclose(found.relative_sides[[0, 3]], [10 / 20000**0.5, 96 / 200])
    np.testing.assert_allclose(found.aspect_ratios, [4, 1, 1, 1, 1 / 400])
    assert found.count_sizes() == (3, 1, 1)  # 32 is medium and 96 is large, as in COCO


@pytest.mark.parametrize(("min_size", "max_size"), [(50, 1000), (80, 90), (300, 333), (0, 0)])
def test_sizes_at_the_input_are_those_of_detectron2s_resize(min_size: int, max_size: int) -> None:
    found = DatasetStatistics.from_records(RECORDS, NAMES)
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


def test_an_empty_dataset_has_empty_statistics() -> None:
    found = DatasetStatistics.from_records([], [])
    assert (len(found.image_sizes), len(found.boxes), found.count_sizes()) == (0, 0, (0, 0, 0))
    assert len(found.relative_sides) == len(found.short_sides_at_input(800, 1333)) == 0


def test_charts_show_every_class_and_every_value() -> None:
    long = "a name of a class that goes on and on to its side"
    counts = {"train": {f"{long} left": 3, f"{long} $ right": 1}, "val": {f"{long} left": 5}}
    axes = plot_class_counts(counts).axes[0]
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert len(set(names)) == 2  # long names stay apart
    np.testing.assert_allclose([bar.get_width() for bar in axes.containers[0]], [75, 25])
    assert [text.get_text() for text in axes.texts] == ["3", "1", "5", "0"]
    values = {"train": np.array([1.0, 10.0, 1000.0]), "val": np.array([5.0]), "none": np.zeros(0)}
    for log in (True, False):
        axes = plot_distribution(values, label="pixels", log=log).axes[0]
        heights = [patch.get_xy()[:, 1].max() for patch in axes.patches]
        np.testing.assert_allclose(heights[-1], 100)
        assert len(heights) == 2
    assert plot_distribution({"one": np.array([7.0, 7.0])}, label="x").axes
