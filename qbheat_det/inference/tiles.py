# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Prediction on overlapping tiles of an image, for small objects."""

from collections.abc import Sequence

import numpy as np
from detectron2.structures import Instances

from qbheat_det.data import check_tile, list_tiles, merge_tiles

from .array_instances import ArrayInstances
from .images import Image
from .predictor import Predictor

_TILES_PER_BATCH = 8


class TiledPredictor:
    """Predicts on overlapping square tiles and on the whole image, and merges the boxes.

    The slicers of supervision and SAHI are not used because they predict tiles one by one.
    """

    def __init__(self, predictor: Predictor, tile: int) -> None:
        """``tile`` is the side of a tile in pixels. Raises a ``UserError`` if it is below 32."""
        check_tile(tile)
        self._predictor = predictor
        self._tile = tile

    def predict_batch(self, images: Sequence[Image]) -> list[Instances]:
        """Predicts on RGB images (H, W, 3) of any sizes. Returns instances on the CPU."""
        return [self._predict(image) for image in images]

    def _predict(self, image: Image) -> Instances:
        """Predicts on one image (H, W, 3) and its tiles."""
        (whole,) = self._predict_batch([image])
        image_height, image_width = image.shape[:2]
        rectangles = list_tiles(image_height, image_width, self._tile)  # (x, y, width, height)
        results: list[Instances] = []  # of the tiles
        for start in range(0, len(rectangles), _TILES_PER_BATCH):
            tiles = []
            for x, y, width, height in rectangles[start : start + _TILES_PER_BATCH]:
                tiles.append(np.ascontiguousarray(image[y : y + height, x : x + width]))
            results += self._predict_batch(tiles)
        return merge_tiles(whole, zip(rectangles, results, strict=True))

    def _predict_batch(self, images: Sequence[Image]) -> list[Instances]:
        """Predicts on images (H, W, 3). Converts the arrays of an exported detector."""
        results = []
        for prediction in self._predictor.predict_batch(images):
            if isinstance(prediction, ArrayInstances):
                prediction = prediction.to_instances()
            results.append(prediction)
        return results
