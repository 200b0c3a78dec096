# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The mapper for detection against Detectron2's: equal boxes, and equal pixels up to rounding."""

from pathlib import Path

import numpy as np
import pytest
import torch
from detectron2.data import DatasetMapper

from qbheat_det.config import get_cfg
from qbheat_det.data import build_mapper
from tests.data.pictures import draw, save


@pytest.mark.parametrize("pixel_format", ["RGB", "BGR"])
@pytest.mark.parametrize("name", ["default", "detr"])
def test_detection_mapper_equals_detectron2(name: str, pixel_format: str, tmp_path: Path) -> None:
    cfg = get_cfg()
    cfg.INPUT.DATASET_MAPPER_NAME, cfg.INPUT.FORMAT = name, pixel_format
    cfg.INPUT.MIN_SIZE_TRAIN, cfg.INPUT.DETR_CROP_RANGE = (120, 200), (60, 90)
    cfg.INPUT.DETR_CROP_RESIZE = (100, 130)
    ours = build_mapper(cfg, True).mapper
    theirs = DatasetMapper(**type(ours).from_config(cfg, True))
    kinds = [("a.jpg", None), ("b.png", None), ("c.jpg", 6)]
    files = [save(tmp_path / end, draw(160, 150), orientation=turn) for end, turn in kinds]
    boxes = [[10.3, 20.0, 50.0, 60.7], [0.0, 0.0, 149.0, 150.0], [140.0, 140.0, 30.0, 40.0]]
    annotations = [
        {"bbox": box, "bbox_mode": 1, "category_id": number, "iscrowd": int(number == 3)}
        for number, box in enumerate([*boxes, boxes[0]])
    ]
    for seed, file in enumerate(4 * files):
        found = []
        for mapper in (ours, theirs):
            np.random.seed(seed)
            found.append(mapper({"file_name": file, "annotations": annotations}))
        a, b = (entry["instances"] for entry in found)
        assert torch.equal(a.gt_boxes.tensor, b.gt_boxes.tensor)
        assert torch.equal(a.gt_classes, b.gt_classes)
        assert a.image_size == b.image_size
        image, expected = (entry["image"].int() for entry in found)
        assert image.shape == expected.shape
        assert (image - expected).abs().max() <= 2


def test_large_jpeg_is_decoded_at_reduced_size_and_boxes_stay(tmp_path: Path) -> None:
    cfg = get_cfg()
    cfg.INPUT.MIN_SIZE_TRAIN = (120,)
    cfg.INPUT.RANDOM_FLIP = "none"
    ours = build_mapper(cfg, True).mapper
    y, x = np.mgrid[:480, :640]
    square = np.where((x >= 160) & (x < 320) & (y >= 80) & (y < 240), 255, 0)
    file = save(tmp_path / "a.jpg", np.stack(3 * [square.astype(np.uint8)], -1), quality=95)
    annotation = {"bbox": [160, 80, 160, 160], "bbox_mode": 1, "category_id": 0}
    entry = ours({"file_name": file, "annotations": [annotation]})
    assert entry["image"].shape == (3, 120, 160)  # a quarter, which a draft gives
    left, top, right, bottom = map(int, entry["instances"].gt_boxes.tensor[0])
    assert (left, top, right, bottom) == (40, 20, 80, 60)
    bright = entry["image"][0] > 127
    assert bright[top:bottom, left:right].all()
    assert bright.sum() == 40 * 40
