# Copyright (c) qbheat_det contributors. Apache-2.0.
"""DETR's mapper: boxes stay on their objects, and sizes are those of the paper."""

from typing import Any

import cv2
import numpy as np
import pytest
import torch
from detectron2.config import CfgNode
from detectron2.data import transforms as T

from qbheat_det.config import get_cfg
from qbheat_det.data import build_detr_crop, build_mapper
from qbheat_det.data.mappers import DetrDatasetMapper

BOXES = [[40, 60, 150, 220], [260, 30, 330, 90]]  # XYWH, of a red and a green object


def make_cfg(**keys: Any) -> CfgNode:
    cfg = get_cfg()
    cfg.INPUT.FORMAT = "RGB"
    cfg.INPUT.DATASET_MAPPER_NAME = "detr"
    for key, value in keys.items():
        cfg.INPUT[key] = value
    return cfg


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """An image of 500 × 400 pixels whose objects are filled boxes of one colour channel."""
    image = np.zeros((400, 500, 3), dtype=np.uint8)
    for channel, (x, y, w, h) in enumerate(BOXES):
        image[y : y + h, x : x + w, channel] = 255
    path = tmp_path_factory.mktemp("images") / "boxes.png"
    assert cv2.imwrite(str(path), image[..., ::-1])
    annotations = [
        {"bbox": list(box), "bbox_mode": 1, "category_id": i, "iscrowd": 0}
        for i, box in enumerate(BOXES)
    ]
    return {
        "file_name": str(path),
        "image_id": 1,
        "height": 400,
        "width": 500,
        "annotations": annotations,
    }


def boxes_from_pixels(image: torch.Tensor) -> dict[int, list[float]]:
    """Returns class -> XYXY around the pixels that are more coloured than not."""
    boxes = {}
    for channel in range(len(BOXES)):
        rows, columns = np.nonzero(image[channel].numpy() >= 128)
        if len(rows):
            x1, y1, x2, y2 = columns.min(), rows.min(), columns.max() + 1, rows.max() + 1
            boxes[channel] = [float(x1), float(y1), float(x2), float(y2)]
    return boxes


def assert_boxes_match_pixels(output: dict[str, Any]) -> None:
    instances = output["instances"]
    assert instances.image_size == tuple(output["image"].shape[1:])
    expected = boxes_from_pixels(output["image"])
    found = dict(
        zip(instances.gt_classes.tolist(), instances.gt_boxes.tensor.tolist(), strict=True)
    )
    for channel in expected.keys() | found.keys():
        if channel not in expected or channel not in found:
            # A sliver under a pixel wide rounds away in one of the two.
            x1, y1, x2, y2 = expected.get(channel) or found[channel]
            assert min(x2 - x1, y2 - y1) <= 2
            continue
        # Half a pixel of rounding and one of interpolation.
        assert found[channel] == pytest.approx(expected[channel], abs=1.6)


def test_boxes_follow_the_pixels_through_flip_scale_and_crop(record: dict[str, Any]) -> None:
    np.random.seed(0)
    mapper = build_mapper(make_cfg(MIN_SIZE_TRAIN=(240, 320, 400), MAX_SIZE_TRAIN=500), True)
    assert isinstance(mapper.mapper, DetrDatasetMapper)
    flipped = 0
    for _ in range(24):
        output = mapper(record)
        assert_boxes_match_pixels(output)
        found = boxes_from_pixels(output["image"])
        flipped += len(found) == 2 and found[0][0] > found[1][0]
    assert 4 <= flipped <= 20
    assert record["annotations"][0]["bbox"] == BOXES[0]


def test_sizes_are_those_of_the_recipe(record: dict[str, Any]) -> None:
    np.random.seed(0)
    sizes = (120, 130, 140, 150)
    mapper = build_mapper(make_cfg(MIN_SIZE_TRAIN=sizes, MAX_SIZE_TRAIN=180), True)
    short, kept = set(), 0
    for _ in range(80):
        height, width = mapper(record)["image"].shape[1:]
        assert max(height, width) <= 180
        short.add(min(height, width) if max(height, width) < 180 else 120)
        # Uncropped, the ratio is that of the image, up to a pixel.
        kept += abs(width / height - 1.25) < 0.01
    assert short == set(sizes)
    assert 25 <= kept <= 55


@pytest.mark.parametrize(("height", "width"), [(480, 640), (100, 900), (700, 500)])
def test_crops_lie_in_the_given_range(height: int, width: int) -> None:
    np.random.seed(0)
    crop = build_detr_crop(resize_to=[400, 500, 600], crop_range=[384, 600])
    image = np.zeros((height, width, 3), dtype=np.uint8)
    found = []
    for _ in range(20):
        data = T.AugInput(image)
        crop(data)
        if data.image.shape != image.shape:
            found.append(data.image.shape[:2])
    assert 3 < len(found) < 17
    assert all(384 <= side <= 600 for shape in found for side in shape)


def test_boxes_that_the_crop_loses_are_dropped_and_the_image_stays(record: dict[str, Any]) -> None:
    np.random.seed(0)
    small = {**record, "annotations": record["annotations"][1:]}
    mapper = build_mapper(
        make_cfg(DETR_CROP_RESIZE=[400], DETR_CROP_RANGE=[120, 160], MIN_SIZE_TRAIN=(160,)), True
    )
    counts = [len(mapper(small)["instances"]) for _ in range(60)]
    assert set(counts) == {0, 1}
