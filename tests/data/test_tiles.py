# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Tiles of images and their boxes, against crops in NumPy."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from detectron2.structures import BoxMode
from PIL import Image

from qbheat_det.config import load_config
from qbheat_det.core.errors import UserError
from qbheat_det.data import build_mapper
from qbheat_det.data.tiles import EMPTY_SHARE, OVERLAP, check_tile, cut_records, list_tiles
from qbheat_det.modeling.contracts import TILE

SIZE = (150, 230)  # height, width
SIDE = 64


def make_record(path: Path, boxes: np.ndarray) -> dict[str, Any]:
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


def draw_boxes(number: int, largest: int) -> np.ndarray:
    """Returns random boxes (N, 4) with sides of 4 to ``largest`` pixels, inside the image."""
    rng = np.random.default_rng(0)
    sides = rng.integers(4, largest + 1, (number, 2))
    start = (rng.random((number, 2)) * (np.array(SIZE[::-1]) - sides)).astype(int)
    return np.concatenate([start, start + sides], axis=1)


def test_tiles_are_crops_with_the_boxes_of_which_half_is_visible(tmp_path: Path) -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (*SIZE, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
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


def test_a_box_smaller_than_the_overlap_is_whole_in_a_tile() -> None:
    boxes = draw_boxes(300, int(OVERLAP * SIDE) - 1)
    tiles = np.array(list_tiles(*SIZE, SIDE))
    start, end = tiles[:, None, :2], tiles[:, None, :2] + tiles[:, None, 2:]
    inside = ((boxes[None, :, :2] >= start) & (boxes[None, :, 2:] <= end)).all(axis=2)
    assert inside.any(axis=0).all()


def test_few_tiles_without_boxes_are_kept_in_training() -> None:
    records = [make_record(Path("a.png"), draw_boxes(3, 10)), make_record(Path("b.png"), [])]
    tiles = [record for record in cut_records(records, SIDE, is_train=True) if TILE in record]
    every = [record for record in cut_records(records, SIDE, is_train=False) if TILE in record]
    filled = [record for record in tiles if record["annotations"]]
    assert filled == [record for record in every if record["annotations"]]
    assert len(tiles) - len(filled) == int(EMPTY_SHARE * len(filled))
    assert len(every) == 2 * len(list_tiles(*SIZE, SIDE))


def test_bad_tiles_are_refused() -> None:
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
