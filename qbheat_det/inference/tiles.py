# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Prediction on overlapping tiles, for objects that are small in large images.

Own code, since the slicers of supervision and SAHI send one tile at a time through the model.
"""

import itertools
import math
from collections.abc import Sequence

import numpy as np
import torch
from detectron2.layers import batched_nms
from detectron2.structures import Boxes, Instances, pairwise_ioa
from torch import Tensor

from qbheat_det.core.errors import UserError

from .predict import Predictor
from .video import Image

OVERLAP = 0.2  # of a tile
_EDGE = 2  # pixels: a box this close to the edge of a tile is cut
_BATCH = 8  # tiles
_NMS_IOU = 0.5
_COVERED = 0.5  # share of a cut box inside a whole one of its class


class TiledPredictor:
    """Predicts on tiles and on the whole image, and merges the boxes."""

    def __init__(self, predictor: Predictor, tile: int) -> None:
        """
        Args:
            predictor: of boxes.
            tile: side of a square tile in pixels of the image; tiles overlap by ``OVERLAP``.

        Raises:
            UserError: tile is less than 32.
        """
        if tile < 32:
            raise UserError(f"tile is {tile}, expected at least 32 pixels")
        self._predictor = predictor
        self._tile = tile

    def __call__(self, image: Image) -> dict[str, Instances]:
        """From a BGR image (H, W, 3) to {"instances"}."""
        return {"instances": self.predict_batch([image])[0]}

    def predict_batch(self, images: Sequence[Image]) -> list[Instances]:
        """From BGR images (H, W, 3) of any sizes to instances on the CPU."""
        return [self._predict(image) for image in images]

    def _predict(self, image: Image) -> Instances:
        height, width = image.shape[:2]
        (whole,) = self._predictor.predict_batch([image])
        corners = list(
            itertools.product(tile_starts(height, self._tile), tile_starts(width, self._tile))
        )
        if len(corners) == 1:
            return whole
        found, is_cut = [whole], [torch.zeros(len(whole), dtype=torch.bool)]
        for first in range(0, len(corners), _BATCH):
            chunk = corners[first : first + _BATCH]
            crops = [image[y : y + self._tile, x : x + self._tile] for y, x in chunk]
            tiles = self._predictor.predict_batch([np.ascontiguousarray(crop) for crop in crops])
            for (y, x), instances in zip(chunk, tiles, strict=True):
                boxes = instances.pred_boxes.tensor + torch.tensor([x, y, x, y])
                tile = (x, y, min(x + self._tile, width), min(y + self._tile, height))
                is_cut.append(_touches_inner_edge(boxes, tile, (height, width)))
                moved = Instances((height, width), **instances.get_fields())
                moved.pred_boxes = Boxes(boxes)
                found.append(moved)
        return _merge(Instances.cat(found), torch.cat(is_cut))


def tile_starts(size: int, tile: int) -> list[int]:
    """Returns where tiles start along an axis: evenly, from edge to edge, ``OVERLAP`` or more."""
    if size <= tile:
        return [0]
    overlap = OVERLAP * tile
    number = math.ceil((size - overlap) / (tile - overlap))
    return [round(index * (size - tile) / (number - 1)) for index in range(number)]


def _touches_inner_edge(
    boxes: Tensor, tile: tuple[int, int, int, int], size: tuple[int, int]
) -> Tensor:
    """Returns for boxes (N, 4) whether an edge of the tile that is none of the image cuts them."""
    x1, y1, x2, y2 = tile
    height, width = size
    return (
        ((boxes[:, 0] < x1 + _EDGE) & (x1 > 0))
        | ((boxes[:, 1] < y1 + _EDGE) & (y1 > 0))
        | ((boxes[:, 2] > x2 - _EDGE) & (x2 < width))
        | ((boxes[:, 3] > y2 - _EDGE) & (y2 < height))
    )


def _merge(found: Instances, is_cut: Tensor) -> Instances:
    """Returns the boxes that neither a whole box of their class covers nor NMS removes."""
    whole, cut = found[~is_cut], found[is_cut]
    covered = pairwise_ioa(whole.pred_boxes, cut.pred_boxes) > _COVERED  # (whole, cut)
    covered &= whole.pred_classes[:, None] == cut.pred_classes
    # A weak whole box does not remove a stronger cut one.
    covered &= whole.scores[:, None] >= 0.5 * cut.scores
    left = Instances.cat([whole, cut[~covered.any(dim=0)]])
    return left[batched_nms(left.pred_boxes.tensor, left.scores, left.pred_classes, _NMS_IOU)]
