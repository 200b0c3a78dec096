# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Statistics of a detection dataset: boxes of each class, their sizes, and the images."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from detectron2.structures import BoxMode
from numpy.typing import NDArray

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]

COCO_SIZES = (32.0, 96.0)
"""Sides of the squares that divide small from medium, and medium from large objects, in pixels."""


@dataclass(frozen=True)
class DatasetStatistics:
    """N images and B boxes, without crowds and boxes without an area.

    Attributes:
        class_names: (K,), in contiguous order.
        image_sizes: (N, 2), width and height in pixels.
        boxes: (B, 4), XYWH in pixels of the image.
        image_of: (B,), index of the image.
        class_of: (B,), contiguous.
        num_crowds: annotations with ``iscrowd``.
    """

    class_names: tuple[str, ...]
    image_sizes: Floats
    boxes: Floats
    image_of: Integers
    class_of: Integers
    num_crowds: int

    @classmethod
    def from_records(
        cls, dataset_dicts: Sequence[Mapping[str, Any]], class_names: Sequence[str]
    ) -> "DatasetStatistics":
        """Reads Detectron2's records, which must have ``width`` and ``height``."""
        rows, num_crowds = [], 0
        for index, record in enumerate(dataset_dicts):
            for annotation in record.get("annotations", ()):
                box = list(annotation["bbox"])
                box = BoxMode.convert(box, annotation["bbox_mode"], BoxMode.XYWH_ABS)
                if annotation.get("iscrowd", 0):
                    num_crowds += 1
                elif box[2] > 0 and box[3] > 0:
                    rows.append((*box, index, annotation["category_id"]))
        sizes = [(record["width"], record["height"]) for record in dataset_dicts]
        table = np.array(rows, dtype=np.float64).reshape(-1, 6)
        return cls(
            class_names=tuple(class_names),
            image_sizes=np.array(sizes, dtype=np.float64).reshape(-1, 2),
            boxes=table[:, :4],
            image_of=table[:, 4].astype(np.int64),
            class_of=table[:, 5].astype(np.int64),
            num_crowds=num_crowds,
        )

    @cached_property
    def boxes_per_image(self) -> Integers:
        """(N,)."""
        return np.bincount(self.image_of, minlength=len(self.image_sizes))

    @cached_property
    def boxes_per_class(self) -> Integers:
        """(K,)."""
        return np.bincount(self.class_of, minlength=len(self.class_names))

    @cached_property
    def sides(self) -> Floats:
        """(B,), side of the square with the box's area, in pixels."""
        return np.sqrt(self.boxes[:, 2] * self.boxes[:, 3])

    @cached_property
    def relative_sides(self) -> Floats:
        """(B,), ``sides`` divided by the same of the image."""
        return self.sides / np.sqrt(self.image_sizes.prod(axis=1))[self.image_of]

    @cached_property
    def aspect_ratios(self) -> Floats:
        """(B,), width by height."""
        return self.boxes[:, 2] / self.boxes[:, 3]

    def count_sizes(self) -> tuple[int, ...]:
        """Returns the number of small, medium and large boxes.

        COCO's evaluation divides by an object's annotated ``area``, which masks make smaller.
        """
        return tuple(np.bincount(np.digitize(self.sides, COCO_SIZES), minlength=3).tolist())

    def short_sides_at_input(self, min_size: int, max_size: int) -> Floats:
        """Returns the shorter side of each box after ``ResizeShortestEdge``, (B,), in pixels.

        Args:
            min_size: shorter side of the image; 0 for no resize.
            max_size: limit of its longer side.
        """
        shorter: Floats = self.boxes[:, 2:].min(axis=1)
        if min_size <= 0:
            return shorter
        sizes = self.image_sizes
        scales = np.minimum(min_size / sizes.min(axis=1), max_size / sizes.max(axis=1))
        return shorter * scales[self.image_of]
