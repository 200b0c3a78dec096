# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Loaded records and image files: what passes, and what is named by file and id."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from detectron2.data.build import filter_images_with_only_crowd_annotations
from detectron2.data.detection_utils import check_image_size, read_image
from detectron2.structures import BoxMode
from PIL import Image

from qbheat_det.core.errors import UserError
from qbheat_det.data import find_image_errors, find_record_errors, images, raise_first
from tests.data.pictures import draw, save

WIDTH, HEIGHT = 60, 40


def record(path: str, **fields: Any) -> dict[str, Any]:
    return {"file_name": path, "image_id": 7, "width": WIDTH, "height": HEIGHT, **fields}


def error_kind(one: dict[str, Any]) -> str | None:
    errors = find_image_errors([one], num_threads=1)
    if not errors:
        return None
    assert errors[0].where == f"image {one['file_name']!r} (image id 7)"
    assert "\n" not in errors[0].message
    return errors[0].kind


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("a.jpg", {}),
        ("a.jpg", {"mode": "L"}),
        ("a.jpg", {"mode": "CMYK", "progressive": True}),
        ("a.png", {"mode": "P"}),
        ("a.webp", {}),
        ("a.gif", {}),
    ],
)
def test_whole_files_pass_and_a_jpeg_is_not_decoded(
    name: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path / name, draw(WIDTH, HEIGHT), **options)
    if name == "a.jpg":
        monkeypatch.setattr(images, "read_image", None)
        monkeypatch.setattr(Image.Image, "load", None)
    assert error_kind(record(path)) is None


@pytest.mark.parametrize("name", ["a.jpg", "a.png"])
def test_a_file_cut_short_is_an_error_just_where_training_cannot_read_it(
    name: str, tmp_path: Path
) -> None:
    path = Path(save(tmp_path / name, draw(WIDTH, HEIGHT)))
    whole = path.read_bytes()
    for content in (*(whole[:-cut] for cut in (1, 2, 12, 500)), whole[:1000] + b"\0" * 99):
        path.write_bytes(content)
        try:
            readable = read_image(str(path), "BGR") is not None
        except Exception:
            readable = False
        assert (error_kind(record(str(path))) is None) == readable
    assert not readable


@pytest.mark.parametrize(
    "name", ["empty", "html", "nowhere/a.jpg", "folder", "nul\0", "16.png", "f.tif"]
)
def test_a_file_that_is_no_image_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "html").write_text("<!doctype html><title>404</title>")
    Image.fromarray(np.ones((HEIGHT, WIDTH), np.uint16)).save(tmp_path / "16.png")
    Image.fromarray(np.ones((HEIGHT, WIDTH), np.float32)).save(tmp_path / "f.tif")
    kinds = {"nowhere/a.jpg": "missing image file"}
    kinds |= dict.fromkeys(("16.png", "f.tif"), "image of more than 8 bits")
    assert error_kind(record(str(tmp_path / name))) == kinds.get(name, "unreadable image")


@pytest.mark.parametrize("orientation", [None, 1, 3, 5, 6, 8])
@pytest.mark.parametrize("name", ["a.jpg", "a.png"])
def test_the_size_counts_after_exif_rotation_as_in_detectron2(
    name: str, orientation: int | None, tmp_path: Path
) -> None:
    path = save(tmp_path / name, draw(WIDTH, HEIGHT), orientation=orientation)
    for size in ({}, {"width": HEIGHT, "height": WIDTH}):
        one = record(path, **size)
        try:
            check_image_size(dict(one), read_image(path, "BGR"))
            fits = True
        except ValueError:
            fits = False
        assert fits == (bool(size) == (orientation in (5, 6, 7, 8)))
        assert (error_kind(one) is None) == fits


def test_all_errors_are_found_in_order_and_the_first_counts_the_others(tmp_path: Path) -> None:
    path = save(tmp_path / "a.jpg", draw(WIDTH, HEIGHT))
    records = [record(path, image_id=i) for i in range(50)]
    for position in (3, 20, 49):
        records[position]["width"] = 61
    errors = find_image_errors(records, num_threads=3)
    assert [error.where.split("image id ")[1] for error in errors] == ["3)", "20)", "49)"]
    assert "61 x 40 pixels, but has 60 x 40" in errors[1].reason
    with pytest.raises(UserError, match=r"image id 3\).*2 more"):
        raise_first(errors)


def box(**fields: object) -> dict[str, Any]:
    mask = [[1, 2, 31, 2, 31, 22]]
    box = {"bbox": [1, 2, 30, 20], "bbox_mode": BoxMode.XYWH_ABS, "category_id": 1}
    return {**box, "segmentation": mask, **fields}


def annotated(*annotations: dict[str, Any]) -> dict[str, Any]:
    return record("a.jpg", annotations=list(annotations))


def kinds(*records: dict[str, Any], **options: Any) -> list[str]:
    errors = find_record_errors("some", records, num_classes=2, **options)
    assert all("'some'" in error.where for error in errors)
    return [error.kind for error in errors]


def test_sound_records_pass_and_nothing_to_train_on_is_an_error() -> None:
    crowd = box(iscrowd=1, segmentation={"counts": "", "size": []})
    good = [annotated(), annotated(box(), crowd)]
    assert kinds(*good, filter_empty=True, mask_format="polygon") == []
    assert kinds({"file_name": "a.jpg", "image_id": 3}) == []
    for records in ([annotated()], [annotated(crowd), annotated()]):
        assert filter_images_with_only_crowd_annotations(records) == []
        assert kinds(*records) == []
        assert kinds(*records, filter_empty=True) == ["no boxes"]
    assert kinds() == ["empty dataset"]


BAD_OBJECTS: list[dict[str, Any]] = [
    *({"category_id": value} for value in (2, -1, "cat")),
    {"bbox_mode": None},
    *({"bbox": value} for value in ([1, 2, 3], ["a", 2, 3, 4], None, [float("nan"), 2, 3, 4])),
    *({"bbox": value} for value in ([9, 9, -3, 4], [60, 9, 3, 4], [6, -9, 3, 9])),
    {"bbox": [9, 9, 3, 4], "bbox_mode": BoxMode.XYXY_ABS},
]


@pytest.mark.parametrize("fields", BAD_OBJECTS, ids=str)
def test_an_object_that_cannot_be_trained_on_is_named(fields: dict[str, Any]) -> None:
    (error,) = find_record_errors("some", [annotated(box(), box(**fields))], num_classes=2)
    assert error.where == "dataset 'some': image id 7 ('a.jpg'), object 2"
    assert next(iter(fields)) in error.reason


def test_masks_are_needed_if_masks_are_trained() -> None:
    rle = {"counts": "x", "size": [40, 60]}
    for segmentation, mask_format, expected in (
        (None, "polygon", ["object without a mask"]),
        ([], "bitmask", ["object without a mask"]),
        (rle, "polygon", ["mask of another format"]),
        (rle, "bitmask", []),
    ):
        one = annotated(box(), box(segmentation=segmentation))
        assert kinds(one) == []
        assert kinds(one, mask_format=mask_format) == expected
