# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Loaded records and image files: what passes, and what is named by file and id."""

import io
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

WIDTH, HEIGHT = 60, 40
ORIENTATION = 0x0112


def encode(format: str, *, mode: str = "RGB", orientation: int | None = None, **save: Any) -> bytes:
    """Returns a noisy picture of 60 × 40 stored pixels as a file of a format."""
    pixels = np.random.default_rng(0).integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8)
    image = Image.fromarray(pixels).convert(mode)
    if orientation is not None:
        exif = Image.Exif()
        exif[ORIENTATION] = orientation
        save["exif"] = exif
    buffer = io.BytesIO()
    image.save(buffer, format, **save)
    return buffer.getvalue()


def record(folder: Path, content: bytes, name: str = "a.jpg", **fields: Any) -> dict[str, Any]:
    path = folder / name
    path.write_bytes(content)
    size = {"width": WIDTH, "height": HEIGHT}
    return {"file_name": str(path), "image_id": 7, **size, **fields}


def error_kind(one: dict[str, Any]) -> str | None:
    errors = find_image_errors([one], num_threads=1)
    assert len(errors) <= 1
    if not errors:
        return None
    assert repr(one["file_name"]) in errors[0].where
    assert "image id 7" in errors[0].where
    assert "\n" not in errors[0].message
    return errors[0].kind


JPEG = encode("JPEG")
PNG = encode("PNG")
GOOD: dict[str, bytes] = {
    "jpeg": JPEG,
    "grey": encode("JPEG", mode="L"),
    "cmyk": encode("JPEG", mode="CMYK", progressive=True),
    "jpeg_with_bytes_behind": JPEG + b"\0" * 100,
    "png": encode("PNG", mode="P"),
    "webp": encode("WEBP"),
    "gif": encode("GIF"),
}
BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "unreadable image"),
    "html": (b"<!doctype html><title>404</title>", "unreadable image"),
    "jpeg_half": (JPEG[: len(JPEG) // 2], "truncated or damaged image"),
    "png_half": (PNG[: len(PNG) // 2], "truncated or damaged image"),
    "jpeg_of_zeros_behind_a_half": (JPEG[:1000] + b"\0" * 200, "truncated or damaged image"),
    "sixteen_bits": (encode("PNG", mode="I;16"), "image of more than 8 bits"),
    "floats": (encode("TIFF", mode="F"), "image of more than 8 bits"),
}


@pytest.mark.parametrize("case", [*GOOD, *BAD])
def test_a_whole_file_passes_whatever_its_format_and_a_bad_one_is_named(
    case: str, tmp_path: Path
) -> None:
    content, kind = BAD.get(case) or (GOOD[case], None)
    assert error_kind(record(tmp_path, content)) == kind


@pytest.mark.parametrize("cut", [1, 2, 12, 500])
@pytest.mark.parametrize("whole", [JPEG, PNG], ids=["jpeg", "png"])
def test_a_file_cut_short_is_an_error_just_where_training_cannot_read_it(
    whole: bytes, cut: int, tmp_path: Path
) -> None:
    one = record(tmp_path, whole[:-cut])
    try:
        read_image(one["file_name"], "BGR")
        readable = True
    except Exception:
        readable = False
    assert (error_kind(one) is None) == readable
    assert cut < 100 or not readable


@pytest.mark.parametrize("orientation", [None, 1, 3, 5, 6, 8])
@pytest.mark.parametrize("format", ["JPEG", "PNG"])
@pytest.mark.parametrize("swapped", [False, True])
def test_the_size_counts_after_exif_rotation_as_in_detectron2(
    format: str, orientation: int | None, swapped: bool, tmp_path: Path
) -> None:
    size = {"width": HEIGHT, "height": WIDTH} if swapped else {}
    one = record(tmp_path, encode(format, orientation=orientation), **size)
    try:
        check_image_size(dict(one), read_image(one["file_name"], "BGR"))
        fits = True
    except ValueError:
        fits = False
    assert fits == (swapped == (orientation in (5, 6, 7, 8)))
    assert (error_kind(one) is None) == fits


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nowhere.jpg", "missing image file"),
        ("nowhere/a.jpg", "missing image file"),
        ("folder", "unreadable image"),
        ("nul\0.jpg", "unreadable image"),
    ],
)
def test_a_path_that_cannot_be_opened_is_named(name: str, kind: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    one = {"file_name": str(tmp_path / name), "image_id": 7, "width": 1, "height": 1}
    assert error_kind(one) == kind


def test_all_errors_are_found_in_order_and_the_first_counts_the_others(tmp_path: Path) -> None:
    good = record(tmp_path, JPEG, "good.jpg")
    empty = record(tmp_path, b"", "empty.jpg")
    records = [dict(good, image_id=i) for i in range(50)]
    for position, bad in ((3, empty), (20, {**good, "width": 61}), (49, empty)):
        records[position] = dict(bad, image_id=position)
    errors = find_image_errors(records, num_threads=3)
    found = [int(error.where.split("image id ")[1].rstrip(")")) for error in errors]
    assert found == [3, 20, 49]
    assert "61 x 40 pixels, but has 60 x 40" in errors[1].reason
    with pytest.raises(UserError, match=r"image id 3\).*2 more"):
        raise_first(errors)


def test_a_sound_jpeg_is_never_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "read_image", None)
    monkeypatch.setattr(Image.Image, "load", None)
    for name in ("jpeg", "grey", "cmyk"):
        assert error_kind(record(tmp_path, GOOD[name], name)) is None


def box(**fields: object) -> dict[str, Any]:
    return {
        "bbox": [1, 2, 30, 20],
        "bbox_mode": BoxMode.XYWH_ABS,
        "category_id": 1,
        "segmentation": [[1, 2, 31, 2, 31, 22]],
        **fields,
    }


def annotated(*annotations: dict[str, Any]) -> dict[str, Any]:
    size = {"width": 60, "height": 40}
    return {"file_name": "a.jpg", "image_id": 3, **size, "annotations": list(annotations)}


def kinds(*records: dict[str, Any], **options: Any) -> list[str]:
    errors = find_record_errors("some", records, num_classes=2, **options)
    assert all("'some'" in error.where for error in errors)
    return [error.kind for error in errors]


def test_sound_records_pass_with_and_without_masks() -> None:
    records = [
        annotated(),
        annotated(box(), box(iscrowd=1, segmentation={"counts": "", "size": []})),
    ]
    assert kinds(*records, filter_empty=True) == []
    assert kinds(*records, filter_empty=True, mask_format="polygon") == []
    assert kinds({"file_name": "a.jpg", "image_id": 3}) == []


@pytest.mark.parametrize("records", [[annotated()], [annotated(box(iscrowd=1)), annotated()]])
def test_nothing_to_train_on_is_an_error_as_detectron2_leaves_nothing(
    records: list[dict[str, Any]],
) -> None:
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
    one = annotated(box(), box(segmentation=segmentation))
    assert kinds(one) == []
    assert kinds(one, mask_format=mask_format) == expected
