# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Figures of a detection dataset: how many boxes of what class, how large, in what images."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from detectron2.structures import BoxMode
from numpy.typing import NDArray

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]

COCO_SIZES = ((0.0, 32.0), (32.0, 96.0), (96.0, np.inf))
"""Small, medium and large objects: the side of a square of the same area, in pixels."""


@dataclass(frozen=True)
class DatasetStatistics:
    """What the records of a dataset hold: N images, B boxes with an area that are no crowds.

    Attributes:
        class_names: in contiguous order, K of them.
        image_sizes: (N, 2), width and height in pixels.
        boxes: (B, 4), XYWH in pixels of the images, as annotated.
        image_of: (B,), index of the image.
        class_of: (B,), contiguous index of the class.
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
        """Counts records of Detectron2, which must have ``width`` and ``height``."""
        boxes, image_of, class_of = [], [], []
        num_crowds = 0
        for index, record in enumerate(dataset_dicts):
            for annotation in record.get("annotations", ()):
                if annotation.get("iscrowd", 0):
                    num_crowds += 1
                    continue
                box, mode = annotation["bbox"], annotation["bbox_mode"]
                if mode != BoxMode.XYWH_ABS:
                    box = BoxMode.convert(list(box), mode, BoxMode.XYWH_ABS)
                if box[2] > 0 and box[3] > 0:
                    boxes.append(box)
                    image_of.append(index)
                    class_of.append(annotation["category_id"])
        sizes = [(record["width"], record["height"]) for record in dataset_dicts]
        return cls(
            class_names=tuple(class_names),
            image_sizes=np.array(sizes, dtype=np.float64).reshape(-1, 2),
            boxes=np.array(boxes, dtype=np.float64).reshape(-1, 4),
            image_of=np.array(image_of, dtype=np.int64),
            class_of=np.array(class_of, dtype=np.int64),
            num_crowds=num_crowds,
        )

    @property
    def num_images(self) -> int:
        return len(self.image_sizes)

    @property
    def num_boxes(self) -> int:
        return len(self.boxes)

    @property
    def num_images_without_boxes(self) -> int:
        return int((self.boxes_per_image == 0).sum())

    @cached_property
    def boxes_per_image(self) -> Integers:
        """(N,)."""
        return np.bincount(self.image_of, minlength=self.num_images)

    @cached_property
    def boxes_per_class(self) -> Integers:
        """(K,)."""
        return np.bincount(self.class_of, minlength=len(self.class_names))

    @cached_property
    def images_per_class(self) -> Integers:
        """(K,), images with at least one box of the class."""
        pairs = np.unique(np.stack([self.class_of, self.image_of], axis=1), axis=0)
        return np.bincount(pairs[:, 0], minlength=len(self.class_names))

    @cached_property
    def sides(self) -> Floats:
        """(B,), side of a square of the box's area, in pixels."""
        return np.sqrt(self.boxes[:, 2] * self.boxes[:, 3])

    @cached_property
    def relative_sides(self) -> Floats:
        """(B,), the same as a share of the image's."""
        return self.sides / np.sqrt(self.image_sizes.prod(axis=1))[self.image_of]

    @cached_property
    def aspect_ratios(self) -> Floats:
        """(B,), width by height."""
        return self.boxes[:, 2] / self.boxes[:, 3]

    def count_sizes(self) -> tuple[int, int, int]:
        """Returns the number of small, medium and large boxes, as COCO draws the lines.

        COCO's evaluation takes an object's annotated ``area``, which masks make smaller.
        """
        small, medium, large = (
            int(((self.sides >= low) & (self.sides < high)).sum()) for low, high in COCO_SIZES
        )
        return small, medium, large

    def short_sides_at_input(self, min_size: int, max_size: int) -> Floats:
        """Returns the shorter side of each box where the network sees it, (B,), in pixels.

        Args:
            min_size: the shorter side of an image after ``ResizeShortestEdge``; 0 for no resize.
            max_size: which its longer side must not exceed.
        """
        shorter: Floats = self.boxes[:, 2:].min(axis=1)
        if min_size <= 0:
            return shorter
        scales = np.minimum(
            min_size / self.image_sizes.min(axis=1), max_size / self.image_sizes.max(axis=1)
        )
        return shorter * scales[self.image_of]
