# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Loaded records: what training needs of them, and what Detectron2 does without the check."""

from typing import Any

import pytest
from detectron2.data.build import filter_images_with_only_crowd_annotations
from detectron2.structures import BoxMode

from qbheat_det.core.errors import UserError
from qbheat_det.data import raise_first
from qbheat_det.data.record_checks import find_record_errors

Record = dict[str, Any]


def box(**fields: object) -> Record:
    return {
        "bbox": [1, 2, 30, 20],
        "bbox_mode": BoxMode.XYWH_ABS,
        "category_id": 1,
        "segmentation": [[1, 2, 31, 2, 31, 22]],
        **fields,
    }


def record(*annotations: Record) -> Record:
    size = {"width": 60, "height": 40}
    return {"file_name": "a.jpg", "image_id": 3, **size, "annotations": list(annotations)}


def test_sound_records_pass_with_and_without_masks() -> None:
    records = [record(), record(box(), box(iscrowd=1, segmentation={"counts": "", "size": []}))]
    raise_first(find_record_errors("some", records, num_classes=2, filter_empty=True))
    raise_first(
        find_record_errors("some", records, num_classes=2, filter_empty=True, mask_format="polygon")
    )


def test_records_without_annotations_at_all_are_no_boxes() -> None:
    records = [{"file_name": "a.jpg", "image_id": 3}]
    assert find_record_errors("some", records, num_classes=2) == []
    assert len(find_record_errors("some", records, num_classes=2, filter_empty=True)) == 1


def test_no_images_are_named() -> None:
    with pytest.raises(UserError, match="dataset 'some': it has no images"):
        raise_first(find_record_errors("some", [], num_classes=2))


@pytest.mark.parametrize("records", [[record()], [record(box(iscrowd=1)), record()]])
def test_nothing_to_train_on_is_said_where_detectron2_leaves_nothing(records: list[Record]) -> None:
    assert filter_images_with_only_crowd_annotations(records) == []
    raise_first(find_record_errors("some", records, num_classes=2, filter_empty=False))
    with pytest.raises(UserError, match=rf"'some': none of its {len(records)} images has a box"):
        raise_first(find_record_errors("some", records, num_classes=2, filter_empty=True))


BAD: dict[str, tuple[Record, str]] = {
    "class_too_large": ({"category_id": 2}, "category_id 2 is none of the 2 classes"),
    "class_negative": ({"category_id": -1}, "category_id -1"),
    "class_as_text": ({"category_id": "cat"}, "category_id 'cat'"),
    "no_mode": ({"bbox_mode": None}, "bbox_mode"),
    "three_numbers": ({"bbox": [1, 2, 3]}, "four numbers"),
    "text": ({"bbox": ["a", 2, 3, 4]}, "four numbers"),
    "no_box": ({"bbox": None}, "four numbers"),
    "nan": ({"bbox": [float("nan"), 2, 3, 4]}, "not finite"),
    "negative": ({"bbox": [9, 9, -3, 4]}, "negative"),
    "corners_as_size": ({"bbox": [9, 9, 3, 4], "bbox_mode": BoxMode.XYXY_ABS}, "negative"),
    "right_of_it": ({"bbox": [60, 9, 3, 4]}, "outside its image of 60 x 40"),
    "above_it": ({"bbox": [6, -9, 3, 9]}, "outside its image"),
}


@pytest.mark.parametrize("case", BAD)
def test_an_object_that_cannot_be_trained_on_is_named(case: str) -> None:
    fields, expected = BAD[case]
    faults = find_record_errors("some", [record(box(), box(**fields))], num_classes=2)
    assert len(faults) == 1
    assert "'some': image id 3 ('a.jpg'), object 2" in faults[0].where
    assert expected in faults[0].reason


@pytest.mark.parametrize(
    ("segmentation", "mask_format", "expected"),
    [
        (None, "polygon", "MODEL.MASK_ON"),
        ([], "bitmask", "MODEL.MASK_ON"),
        ({"counts": "x", "size": [40, 60]}, "polygon", "set it to bitmask"),
        ({"counts": "x", "size": [40, 60]}, "bitmask", None),
    ],
)
def test_masks_are_asked_for_where_masks_are_trained(
    segmentation: object, mask_format: Any, expected: str | None
) -> None:
    records = [record(box(), box(segmentation=segmentation))]
    assert find_record_errors("some", records, num_classes=2) == []
    faults = find_record_errors("some", records, num_classes=2, mask_format=mask_format)
    assert [expected in fault.reason for fault in faults if expected] == [True] * len(faults)
    assert len(faults) == (expected is not None)
