# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Tiles of training images against crops in NumPy; objects that tiles find once and whole."""

from pathlib import Path

import cv2
import numpy as np
import PIL.Image
import pytest
import torch
from detectron2.structures import Boxes, BoxMode, Instances

from qbheat_det.config import load_config
from qbheat_det.core.errors import UserError
from qbheat_det.data import build_mapper
from qbheat_det.data.tiles import (
    EMPTY_SHARE,
    OVERLAP,
    TiledEvaluator,
    check_tile,
    cut_records,
    list_tiles,
    merge_tiles,
    tile_starts,
)
from qbheat_det.inference.tiles import TiledPredictor
from qbheat_det.modeling.contracts import TILE

SIZE = (150, 230)  # height, width
SIDE = 64


def make_record(path, boxes):
    annotations = [
        {
            "bbox": list(map(float, box)),
            "bbox_mode": BoxMode.XYXY_ABS,
            "category_id": k,
            "iscrowd": 0,
        }
        for k, box in enumerate(boxes)
    ]
    size = {"height": SIZE[0], "width": SIZE[1]}
    return {"file_name": str(path), "image_id": 7, **size, "annotations": annotations}


def draw_boxes(number, largest):
    """Returns random boxes (N, 4) with sides of 4 to ``largest`` pixels, inside the image."""
    rng = np.random.default_rng(0)
    sides = rng.integers(4, largest + 1, (number, 2))
    start = (rng.random((number, 2)) * (np.array(SIZE[::-1]) - sides)).astype(int)
    return np.concatenate([start, start + sides], axis=1)


def test_tiles_are_crops_with_the_boxes_of_which_half_is_visible(tmp_path):
    pixels = np.random.default_rng(1).integers(0, 256, (*SIZE, 3), dtype=np.uint8)
    PIL.Image.fromarray(pixels).save(tmp_path / "a.png")
    boxes = draw_boxes(60, 70)
    words = f"INPUT.TILE {SIDE} INPUT.FORMAT RGB INPUT.MIN_SIZE_TRAIN ({SIDE},)"
    cfg = load_config(None, [*words.split(), "INPUT.RANDOM_FLIP", "none"])
    mapper = build_mapper(cfg, is_train=True)
    cut = cut_records([make_record(tmp_path / "a.png", boxes)], SIDE, is_train=False)
    assert [record.get(TILE) for record in cut] == [None, *list_tiles(*SIZE, SIDE)]
    num_cut = num_dropped = 0
    for record in cut[1:]:
        x, y, w, h = record[TILE]
        inside = np.clip(boxes, [x, y, x, y], [x + w, y + h, x + w, y + h])
        areas, whole = (np.maximum(b[:, 2:] - b[:, :2], 0).prod(axis=1) for b in (inside, boxes))
        kept = areas >= 0.5 * whole
        entry = mapper(record)
        assert isinstance(entry, dict)
        np.testing.assert_array_equal(
            entry["image"].permute(1, 2, 0).numpy(), pixels[y : y + h, x : x + w]
        )
        assert (entry["height"], entry["width"]) == (h, w)
        assert entry["instances"].gt_classes.tolist() == np.flatnonzero(kept).tolist()
        expected = inside[kept] - [x, y, x, y]
        np.testing.assert_array_equal(entry["instances"].gt_boxes.tensor.numpy(), expected)
        num_cut += int((kept & (areas < whole)).sum())
        num_dropped += int(((areas > 0) & ~kept).sum())
    assert num_cut
    assert num_dropped


def test_a_box_smaller_than_the_overlap_is_whole_in_a_tile():
    boxes = draw_boxes(300, int(OVERLAP * SIDE) - 1)
    tiles = np.array(list_tiles(*SIZE, SIDE))
    start, end = tiles[:, None, :2], tiles[:, None, :2] + tiles[:, None, 2:]
    inside = ((boxes[None, :, :2] >= start) & (boxes[None, :, 2:] <= end)).all(axis=2)
    assert inside.any(axis=0).all()


def test_few_tiles_without_boxes_are_kept_in_training():
    records = [make_record(Path("a.png"), draw_boxes(3, 10)), make_record(Path("b.png"), [])]
    tiles = [record for record in cut_records(records, SIDE, is_train=True) if TILE in record]
    every = [record for record in cut_records(records, SIDE, is_train=False) if TILE in record]
    filled = [record for record in tiles if record["annotations"]]
    assert filled == [record for record in every if record["annotations"]]
    assert len(tiles) - len(filled) == int(EMPTY_SHARE * len(filled))
    assert len(every) == 2 * len(list_tiles(*SIZE, SIDE))


def test_bad_tiles_are_refused():
    for tile in (31, -1, 64.0, True, "64"):
        with pytest.raises(UserError, match="tile"):
            check_tile(tile)
    record = make_record(Path("a.png"), [])
    assert cut_records([record], 0, is_train=True) == [record]
    with pytest.raises(UserError, match="--tile 0"):
        cut_records([record], 230, is_train=True)
    assert cut_records([record], 230, is_train=False) == [record]
    with pytest.raises(UserError, match=r"a\.png"):
        cut_records([{"file_name": "a.png"}], SIDE, is_train=True)


WINDOW = 160


class Components:
    """Finds rectangles of a class's value that are not too small for the image's size."""

    def __init__(self):
        self.sizes = []

    def predict_batch(self, images):
        return [self._predict(image) for image in images]

    def _predict(self, image):
        self.sizes.append(image.shape[:2])
        boxes = []
        classes = []
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


def test_each_object_is_found_once_whole_and_in_its_place():
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
    found = TiledPredictor(plain, WINDOW).predict_batch([image])[0]
    boxes = found.pred_boxes.tensor.int().tolist()
    rows = [(*box, int(c)) for box, c in zip(boxes, found.pred_classes, strict=True)]
    assert len(missed) == 1
    assert sorted(rows) == sorted(expected)
    assert found.image_size == (400, 600)


def test_an_object_that_no_tile_holds_whole_is_kept():
    """Larger than the overlap, and too small for the whole image: cut boxes are all there is."""
    image = np.zeros((160, 1000, 3), dtype=np.uint8)
    (first, second, *_) = tile_starts(1000, WINDOW)
    assert second < first + WINDOW
    cv2.rectangle(image, (second - 20, 40), (first + WINDOW + 19, 60), (100,) * 3, -1)
    assert len(Components().predict_batch([image])[0]) == 0
    assert len(TiledPredictor(Components(), WINDOW).predict_batch([image])[0]) == 2


@pytest.mark.parametrize("size", [1, 159, 160, 161, 288, 289, 1000, 4001])
def test_tiles_reach_from_edge_to_edge_and_overlap(size):
    starts = tile_starts(size, WINDOW)
    assert starts[0] == 0
    assert starts[-1] == max(0, size - WINDOW)
    steps = np.diff(starts)
    assert (steps <= (1 - OVERLAP) * WINDOW + 1).all()
    # One tile less would overlap less.
    assert len(starts) < 3 or (size - WINDOW) / (len(starts) - 2) > (1 - OVERLAP) * WINDOW


def test_an_image_of_one_tile_is_predicted_once():
    plain = Components()
    TiledPredictor(plain, WINDOW).predict_batch([np.zeros((WINDOW, 90, 3), dtype=np.uint8)])
    assert plain.sizes == [(WINDOW, 90)]


class Edges:
    """Finds the whole image as one box, and in each tile a box at each edge."""

    def predict_batch(self, images):
        return [self._predict(*image.shape[:2]) for image in images]

    def _predict(self, height, width):
        boxes = [[0, 0, width, height]]
        if height == width == WINDOW:
            boxes = [[0, 60, 20, 80], [140, 60, 160, 80], [60, 0, 80, 20], [60, 140, 80, 160]]
        found = Instances((height, width))
        found.pred_boxes = Boxes(torch.tensor(boxes, dtype=torch.float32))
        found.scores = torch.full((len(boxes),), 0.9)
        found.pred_classes = torch.zeros(len(boxes), dtype=torch.int64)
        return found


def test_a_large_box_replaces_boxes_at_edges_of_tiles_but_not_of_the_image():
    assert tile_starts(288, WINDOW) == [0, 128]
    image = np.zeros((288, 288, 3), dtype=np.uint8)
    (found,) = TiledPredictor(Edges(), WINDOW).predict_batch([image])
    expected = [(0, 0, 288, 288)]
    for along in (60, 188):  # in the first and in the second tile
        expected += [(0, along, 20, along + 20), (268, along, 288, along + 20)]
        expected += [(along, 0, along + 20, 20), (along, 268, along + 20, 288)]
    assert sorted(map(tuple, found.pred_boxes.tensor.tolist())) == sorted(expected)


def test_a_large_box_in_a_tile_is_taken_for_a_part():
    def boxes(*rows, size):
        classes = torch.zeros(len(rows), dtype=torch.int64)
        scores = torch.full((len(rows),), 0.9)
        return Instances(
            size, pred_boxes=Boxes(torch.tensor(rows)), pred_classes=classes, scores=scores
        )

    whole = boxes([0.0, 0.0, 300.0, 250.0], size=(300, 300))
    tile = boxes([30.0, 30.0, 110.0, 60.0], [30.0, 70.0, 111.0, 100.0], size=(WINDOW, WINDOW))
    merged = merge_tiles(whole, [((100, 0, WINDOW, WINDOW), tile)])
    expected = [[0, 0, 300, 250], [130, 30, 210, 60]]  # 80 of 160 pixels are not too long
    assert merged.pred_boxes.tensor.tolist() == expected


class Ids:
    """An evaluator that lists the ids of its images."""

    def reset(self):
        self.found = []

    def process(self, inputs, outputs):
        self.found += [entry["image_id"] for entry in inputs]

    def evaluate(self):
        return self.found


def test_an_image_that_breaks_before_its_last_tile_is_left_out_of_the_evaluation():
    evaluator = TiledEvaluator(Ids(), WINDOW)
    evaluator.reset()
    height, width = 2 * WINDOW, WINDOW
    tiles = list_tiles(height, width, WINDOW)
    for image_id, seen in [(1, [None, *tiles]), (2, tiles), (3, [None, *tiles[1:]]), (4, [None])]:
        size = (WINDOW, WINDOW) if image_id == 4 else (height, width)
        for tile in seen:
            found = Instances(size if tile is None else (tile[3], tile[2]))
            found.pred_boxes = Boxes(torch.zeros(0, 4))
            found.scores = torch.zeros(0)
            found.pred_classes = torch.zeros(0, dtype=torch.long)
            entry = {"image_id": image_id, **({TILE: tile} if tile else {})}
            evaluator.process([entry], [{"instances": found}])
    assert evaluator.evaluate() == [1, 4]  # an image that fits into a tile has none
