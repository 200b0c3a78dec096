# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The sentence for every bad annotation: ids, boxes, masks, keypoints."""

from pathlib import Path

import numpy as np
import pycocotools.mask
import pytest

from qbheat_det.data import check_coco_json
from tests.data.coco_content import Content, changed, sentence, with_annotation, write

BAD_ANNOTATIONS: dict[str, tuple[dict[str, object], list[str]]] = {
    "id_missing": ({"id": None}, ["annotation number 2", "id must be a whole number"]),
    "id_as_text": ({"id": "2"}, ["annotation id '2'", "id must be", "whole number"]),
    "id_too_large": ({"id": 2**53}, ["annotation id 9007199254740992", "below 2**53"]),
    "image_of_endless_id": ({"image_id": 10**400}, ["annotation id 2", "image_id 1000"]),
    "id_twice": ({"id": 1}, ["annotation id 1", "more than once", "2 annotation entries"]),
    "unknown_image": ({"image_id": 11}, ["annotation id 2", "image_id 11"]),
    "unknown_category": ({"category_id": 1}, ["annotation id 2", "category_id 1"]),
    "category_as_truth": ({"category_id": True}, ["annotation id 2", "True"]),
    "bbox_null": ({"bbox": None}, ["annotation id 2", "four finite numbers"]),
    "bbox_of_three": ({"bbox": [1, 2, 3]}, ["annotation id 2", "four finite", "[1, 2, 3]"]),
    "bbox_empty": ({"bbox": []}, ["annotation id 2", "four finite"]),
    "bbox_of_text": ({"bbox": ["1", "2", "3", "4"]}, ["annotation id 2", "four finite"]),
    "bbox_with_null": ({"bbox": [1, 2, None, 4]}, ["annotation id 2", "four finite"]),
    "bbox_nan": ({"bbox": [1, 2, float("nan"), 4]}, ["annotation id 2", "finite"]),
    "bbox_infinite": ({"bbox": [1, 2, float("inf"), 4]}, ["annotation id 2", "finite"]),
    "bbox_negative": ({"bbox": [9, 9, -3, 4]}, ["annotation id 2", "negative"]),
    "bbox_right_of_image": ({"bbox": [100, 9, 3, 4]}, ["annotation id 2", "outside"]),
    "bbox_above_image": ({"bbox": [5, -9, 3, 9]}, ["annotation id 2", "outside"]),
    "crowd_of_two": ({"iscrowd": 2}, ["annotation id 2", "iscrowd must be 0 or 1"]),
    "ignored": ({"ignore": 1}, ["annotation id 2", "'ignore' is not supported"]),
    "bbox_endless": ({"bbox": [1, 2, 10**400, 4]}, ["annotation id 2", "four finite"]),
    "bbox_without_area": ({"bbox": [1, 2, 0, 5]}, ["annotation id 2", "has no area"]),
    "polygon_of_text": ({"segmentation": [["1"] * 6]}, ["annotation id 2", "finite coordinates"]),
    "polygon_with_nan": ({"segmentation": [[1, 1, 5, float("nan"), 5, 5]]}, ["annotation id 2"]),
    "polygon_far_away": ({"segmentation": [[1, 1, 5, 1, 5, 1e7]]}, ["near the image"]),
    "keypoints_of_two": ({"keypoints": [1, 2]}, ["annotation id 2", "[x, y, visibility"]),
    "keypoints_as_object": ({"keypoints": {"x": 1}}, ["annotation id 2", "keypoints must"]),
    "rle_of_another_size": (
        {"segmentation": {"counts": [5000], "size": [100, 50]}},
        ["annotation id 2", "size [height, width]"],
    ),
    "rle_too_short": ({"segmentation": {"counts": [9], "size": [50, 100]}}, ["every pixel"]),
    "rle_of_noise": ({"segmentation": {"counts": "@@!", "size": [50, 100]}}, ["every pixel"]),
    "flat_polygon": ({"segmentation": [1, 1, 5, 1, 5, 5]}, ["annotation id 2", "polygons"]),
    "rle_without_size": ({"segmentation": {"counts": "x"}}, ["annotation id 2", "and size"]),
}


@pytest.mark.parametrize("case", BAD_ANNOTATIONS)
def test_a_bad_annotation_is_named(case: str, tmp_path: Path) -> None:
    fields, expected = BAD_ANNOTATIONS[case]
    text = sentence(tmp_path, changed(with_annotation(**fields)))
    for part in expected:
        assert part in text


def test_a_few_boxes_without_area_among_many_are_a_warning_as_in_coco(tmp_path: Path) -> None:
    def repeat(content: Content) -> None:
        box = content["annotations"][1]
        content["annotations"] = [{**box, "id": i} for i in range(1, 20_001)]
        content["annotations"][7]["bbox"] = [1, 2, 0, 5]

    summary = check_coco_json(*write(tmp_path, changed(repeat)))
    assert summary.num_boxes == 19_999
    assert any("1 annotations have a box without area" in text for text in summary.warnings)


@pytest.mark.parametrize("seed", range(20))
def test_masks_that_pycocotools_writes_are_taken(seed: int, tmp_path: Path) -> None:
    random = np.random.default_rng(seed)
    pixels = random.random((50, 100)) < random.choice([0.0, 0.01, 0.5, 1.0])
    encoded = pycocotools.mask.encode(np.asfortranarray(pixels, dtype=np.uint8))
    rle = {"counts": encoded["counts"].decode(), "size": [50, 100]}
    check_coco_json(*write(tmp_path, changed(with_annotation(segmentation=rle))))
    shorter = {**rle, "counts": rle["counts"][:-1]}
    assert "every pixel" in sentence(tmp_path, changed(with_annotation(segmentation=shorter)))


def test_boxes_within_a_pixel_of_the_border_are_no_warning(tmp_path: Path) -> None:
    content = changed(with_annotation(bbox=[-0.5, 0, 101, 50.9]))
    assert check_coco_json(*write(tmp_path, content)).warnings == ()
