# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Tiles find each small object once, keep large ones whole, and leave small images alone."""

from collections.abc import Sequence

import cv2
import numpy as np
import pytest
import torch
from detectron2.structures import Boxes, Instances

from qbheat_det.data.tiles import OVERLAP, merge_tiles, tile_starts
from qbheat_det.inference.images import Image
from qbheat_det.inference.predict import TiledPredictor

TILE = 160


class Components:
    """Finds rectangles of a class's value that are not too small for the image's size."""

    def __init__(self) -> None:
        self.sizes: list[tuple[int, int]] = []

    def predict_batch(self, images: Sequence[Image]) -> list[Instances]:
        return [self._predict(image) for image in images]

    def _predict(self, image: Image) -> Instances:
        self.sizes.append(image.shape[:2])
        boxes: list[list[int]] = []
        classes: list[int] = []
        for index, value in enumerate((100, 200)):
            mask = (image[:, :, 0] == value).astype(np.uint8)
            for x, y, w, h, _ in cv2.connectedComponentsWithStats(mask)[2][1:]:
                if max(w, h) >= max(image.shape) / 10:
                    boxes.append([x, y, x + w, y + h])
                    classes.append(index)
        found = Instances(image.shape[:2])
        found.pred_boxes = Boxes(torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4))
        found.scores = torch.full((len(boxes),), 0.9)
        found.pred_classes = torch.tensor(classes, dtype=torch.int64)
        return found


def test_each_object_is_found_once_whole_and_in_its_place() -> None:
    image = np.zeros((400, 600, 3), dtype=np.uint8)
    expected = {(10, 10, 290, 390, 0)}  # larger than any tile
    cv2.rectangle(image, (10, 10), (289, 389), (100,) * 3, -1)
    for y in range(5, 370, 37):  # across the edges of tiles, and at those of the image
        for x in range(310, 580, 41):
            index = (x + y) % 2
            cv2.rectangle(image, (x, y), (x + 19, y + 22), ((100, 200)[index],) * 3, -1)
            expected.add((x, y, x + 20, y + 23, index))
    plain = Components()
    (missed,) = plain.predict_batch([image])
    found = TiledPredictor(plain, TILE).predict_batch([image])[0]
    boxes = found.pred_boxes.tensor.int().tolist()
    rows = [(*box, int(c)) for box, c in zip(boxes, found.pred_classes, strict=True)]
    assert len(missed) == 1
    assert sorted(rows) == sorted(expected)
    assert found.image_size == (400, 600)


def test_an_object_that_no_tile_holds_whole_is_kept() -> None:
    """Larger than the overlap, and too small for the whole image: cut boxes are all there is."""
    image = np.zeros((160, 1000, 3), dtype=np.uint8)
    (first, second, *_) = tile_starts(1000, TILE)
    assert second < first + TILE
    cv2.rectangle(image, (second - 20, 40), (first + TILE + 19, 60), (100,) * 3, -1)
    assert len(Components().predict_batch([image])[0]) == 0
    assert len(TiledPredictor(Components(), TILE).predict_batch([image])[0]) == 2


@pytest.mark.parametrize("size", [1, 159, 160, 161, 288, 289, 1000, 4001])
def test_tiles_reach_from_edge_to_edge_and_overlap(size: int) -> None:
    starts = tile_starts(size, TILE)
    assert starts[0] == 0
    assert starts[-1] == max(0, size - TILE)
    steps = np.diff(starts)
    assert (steps <= (1 - OVERLAP) * TILE + 1).all()
    # One tile less would overlap less.
    assert len(starts) < 3 or (size - TILE) / (len(starts) - 2) > (1 - OVERLAP) * TILE


def test_an_image_of_one_tile_is_predicted_once() -> None:
    plain = Components()
    TiledPredictor(plain, TILE).predict_batch([np.zeros((TILE, 90, 3), dtype=np.uint8)])
    assert plain.sizes == [(TILE, 90)]


class Edges:
    """Finds the whole image as one box, and in each tile a box at each edge."""

    def predict_batch(self, images: Sequence[Image]) -> list[Instances]:
        return [self._predict(*image.shape[:2]) for image in images]

    def _predict(self, height: int, width: int) -> Instances:
        boxes = [[0, 0, width, height]]
        if height == width == TILE:
            boxes = [[0, 60, 20, 80], [140, 60, 160, 80], [60, 0, 80, 20], [60, 140, 80, 160]]
        found = Instances((height, width))
        found.pred_boxes = Boxes(torch.tensor(boxes, dtype=torch.float32))
        found.scores = torch.full((len(boxes),), 0.9)
        found.pred_classes = torch.zeros(len(boxes), dtype=torch.int64)
        return found


def test_a_large_box_replaces_boxes_at_edges_of_tiles_but_not_of_the_image() -> None:
    assert tile_starts(288, TILE) == [0, 128]
    image = np.zeros((288, 288, 3), dtype=np.uint8)
    (found,) = TiledPredictor(Edges(), TILE).predict_batch([image])
    expected = [(0, 0, 288, 288)]
    for along in (60, 188):  # in the first and in the second tile
        expected += [(0, along, 20, along + 20), (268, along, 288, along + 20)]
        expected += [(along, 0, along + 20, 20), (along, 268, along + 20, 288)]
    assert sorted(map(tuple, found.pred_boxes.tensor.tolist())) == sorted(expected)


def test_a_large_box_in_a_tile_is_taken_for_a_part() -> None:
    def boxes(*rows: list[float], size: tuple[int, int]) -> Instances:
        classes = torch.zeros(len(rows), dtype=torch.int64)
        scores = torch.full((len(rows),), 0.9)
        return Instances(
            size, pred_boxes=Boxes(torch.tensor(rows)), pred_classes=classes, scores=scores
        )

    whole = boxes([0.0, 0.0, 300.0, 250.0], size=(300, 300))
    tile = boxes([30.0, 30.0, 110.0, 60.0], [30.0, 70.0, 111.0, 100.0], size=(TILE, TILE))
    merged = merge_tiles(whole, [((100, 0, TILE, TILE), tile)])
    expected = [[0, 0, 300, 250], [130, 30, 210, 60]]  # 80 of 160 pixels are not too long
    assert merged.pred_boxes.tensor.tolist() == expected
