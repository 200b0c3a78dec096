# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Loaded records: what training needs of them, and what Detectron2 does without the check."""

from typing import Any

import pytest
from detectron2.data.build import filter_images_with_only_crowd_annotations
from detectron2.structures import BoxMode

from qbheat_det.core.errors import UserError
from qbheat_det.data import raise_first
from qbheat_det.data.checks import find_record_errors

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


def kinds(*records: Record, **options: Any) -> list[str]:
    errors = find_record_errors("some", records, num_classes=2, **options)
    assert all("'some'" in error.where for error in errors)
    return [error.kind for error in errors]


def test_sound_records_pass_with_and_without_masks() -> None:
    records = [record(), record(box(), box(iscrowd=1, segmentation={"counts": "", "size": []}))]
    assert kinds(*records, filter_empty=True) == []
    assert kinds(*records, filter_empty=True, mask_format="polygon") == []
    assert kinds({"file_name": "a.jpg", "image_id": 3}) == []


@pytest.mark.parametrize("records", [[record()], [record(box(iscrowd=1)), record()]])
def test_nothing_to_train_on_is_an_error_as_detectron2_leaves_nothing(
    records: list[Record],
) -> None:
    assert filter_images_with_only_crowd_annotations(records) == []
    assert kinds(*records) == []
    assert kinds(*records, filter_empty=True) == ["no boxes"]
    assert kinds() == ["empty dataset"]


BAD: list[Record] = [
    *({"category_id": value} for value in (2, -1, "cat")),
    {"bbox_mode": None},
    *({"bbox": value} for value in ([1, 2, 3], ["a", 2, 3, 4], None, [float("nan"), 2, 3, 4])),
    *({"bbox": value} for value in ([9, 9, -3, 4], [60, 9, 3, 4], [6, -9, 3, 9])),
    {"bbox": [9, 9, 3, 4], "bbox_mode": BoxMode.XYXY_ABS},
]


@pytest.mark.parametrize("fields", BAD, ids=str)
def test_an_object_that_cannot_be_trained_on_is_named(fields: Record) -> None:
    (error,) = find_record_errors("some", [record(box(), box(**fields))], num_classes=2)
    assert error.where == "dataset 'some': image id 3 ('a.jpg'), object 2"
    with pytest.raises(UserError, match=next(iter(fields))):
        raise_first([error])


@pytest.mark.parametrize(
    ("segmentation", "mask_format", "expected"),
    [
        (None, "polygon", ["object without a mask"]),
        ([], "bitmask", ["object without a mask"]),
        ({"counts": "x", "size": [40, 60]}, "polygon", ["mask of another format"]),
        ({"counts": "x", "size": [40, 60]}, "bitmask", []),
    ],
)
def test_masks_are_needed_if_masks_are_trained(
    segmentation: object, mask_format: str, expected: list[str]
) -> None:
    one = record(box(), box(segmentation=segmentation))
    assert kinds(one) == []
    assert kinds(one, mask_format=mask_format) == expected
