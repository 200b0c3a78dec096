# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Small annotation files and results, for tests of what is said about detections."""

from collections.abc import Sequence
from typing import Any

import numpy as np

SIDE = 100.0


def make_truth(
    boxes: Sequence[tuple[int, int, Sequence[float]]],
    *,
    num_images: int = 1,
    categories: Sequence[int] = (3, 7),
    crowds: Sequence[int] = (),
) -> dict[str, Any]:
    """An annotation file's content.

    Args:
        boxes: image id, category id and XYXY each.
        num_images: with ids from 1.
        categories: ids.
        crowds: indices of boxes that are crowds.
    """
    return {
        "images": [
            {"id": i, "width": SIDE, "height": SIDE, "file_name": f"{i}.png"}
            for i in range(1, num_images + 1)
        ],
        "categories": [{"id": k, "name": f"class{k}"} for k in categories],
        "annotations": [
            {
                "id": index,  # from 0, which COCO takes for "none"
                "image_id": image,
                "category_id": category,
                "bbox": [x0, y0, x1 - x0, y1 - y0],
                "iscrowd": int(index in crowds),
            }
            for index, (image, category, (x0, y0, x1, y1)) in enumerate(boxes)
        ],
    }


def make_found(
    boxes: Sequence[tuple[int, int, Sequence[float], float]],
) -> list[dict[str, Any]]:
    """Results in COCO's format from image id, category id, XYXY and score each."""
    return [
        {"image_id": i, "category_id": k, "bbox": [x0, y0, x1 - x0, y1 - y0], "score": score}
        for i, k, (x0, y0, x1, y1), score in boxes
    ]


def draw_case(seed: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Random boxes of two classes in four images, with crowds, and detections about them."""
    rng = np.random.default_rng(seed)

    def box() -> list[float]:
        start = rng.uniform(0, 60, 2)
        return [*start, *(start + rng.uniform(10, 40, 2))]

    true = [(int(rng.integers(1, 4)), int(rng.choice([3, 7])), box()) for _ in range(14)]
    found = []
    for image, category, corners in true * 3:
        moved = np.array(corners) + rng.normal(0, 4, 4)
        category = category if rng.uniform() < 0.7 else int(rng.choice([3, 7]))
        # Few different scores: many are equal.
        found.append((image, category, moved.tolist(), float(rng.integers(1, 9)) / 8))
    found += [(int(rng.integers(1, 5)), 3, box(), 0.5) for _ in range(10)]  # image 4 has no boxes
    return make_truth(true, num_images=4, crowds=(0, 5)), make_found(found)
