# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Image files: what is taken for whole, and the sentence for everything else."""

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from detectron2.data.detection_utils import check_image_size, read_image
from PIL import Image

from qbheat_det.core.errors import UserError
from qbheat_det.data import checks
from qbheat_det.data.checks import check_image_files, find_image_errors

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
    "progressive": encode("JPEG", progressive=True),
    "grey": encode("JPEG", mode="L"),
    "cmyk": encode("JPEG", mode="CMYK"),
    "jpeg_with_bytes_behind": JPEG + b"\0" * 100,
    "png": PNG,
    "palette": encode("PNG", mode="P"),
    "alpha": encode("PNG", mode="RGBA"),
    "png_with_bytes_behind": PNG + b"more",
    "bmp": encode("BMP"),
    "webp": encode("WEBP"),
    "tiff": encode("TIFF"),
    "gif": encode("GIF"),
}


@pytest.mark.parametrize("case", GOOD)
def test_a_whole_file_passes_whatever_its_format(case: str, tmp_path: Path) -> None:
    assert error_kind(record(tmp_path, GOOD[case])) is None


BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "empty image file"),
    "text": (b"not an image at all", "unreadable image"),
    "html": (b"<!doctype html><title>404</title>", "unreadable image"),
    "jpeg_header_alone": (JPEG[:2], "unreadable image"),
    "jpeg_half": (JPEG[: len(JPEG) // 2], "truncated or damaged image"),
    "png_half": (PNG[: len(PNG) // 2], "truncated or damaged image"),
    "png_header_alone": (PNG[:60], "truncated or damaged image"),
    "bmp_half": (encode("BMP")[:1000], "truncated or damaged image"),
    "webp_half": (GOOD["webp"][: len(GOOD["webp"]) // 2], "unreadable image"),
    "jpeg_of_zeros_behind_a_half": (JPEG[:1000] + b"\0" * 200, "truncated or damaged image"),
    "sixteen_bits": (encode("PNG", mode="I;16"), "image of more than 8 bits"),
    "floats": (encode("TIFF", mode="F"), "image of more than 8 bits"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_is_named(case: str, tmp_path: Path) -> None:
    content, kind = BAD[case]
    one = record(tmp_path, content)
    assert error_kind(one) == kind
    with pytest.raises(UserError, match=r"a\.jpg' \(image id 7\): "):
        check_image_files([one])


@pytest.mark.parametrize("cut", [1, 2, 3, 12, 100, 500])
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


@pytest.mark.parametrize("orientation", [None, *range(1, 9)])
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
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


def test_rotation_behind_the_pixels_of_a_png_counts_too(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    chunk = b"eXIf" + exif.tobytes().removeprefix(b"Exif\0\0")
    late = struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk))
    one = record(tmp_path, PNG[:-12] + late + PNG[-12:], width=HEIGHT, height=WIDTH)
    check_image_size(dict(one), read_image(one["file_name"], "BGR"))
    assert error_kind(one) is None


@pytest.mark.parametrize("size", [(61, 40), (60, 41), (40, 60)])
def test_another_size_names_both(size: tuple[int, int], tmp_path: Path) -> None:
    one = record(tmp_path, JPEG, width=size[0], height=size[1])
    with pytest.raises(UserError, match=f"{size[0]} x {size[1]} .*60 x 40"):
        check_image_files([one])


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


def test_all_faults_are_found_in_order_and_the_first_counts_the_others(tmp_path: Path) -> None:
    good = record(tmp_path, JPEG, "good.jpg")
    empty = record(tmp_path, b"", "empty.jpg")
    wrong = {**good, "width": 1}
    records = [dict(good, image_id=i) for i in range(500)]
    for position, bad in ((3, empty), (70, wrong), (200, empty), (499, empty)):
        records[position] = dict(bad, image_id=position)
    errors = find_image_errors(records, num_threads=3)
    found = [int(error.where.split("image id ")[1].rstrip(")")) for error in errors]
    assert found == [3, 70, 200, 499]
    with pytest.raises(UserError, match=r"image id 3\).*2 more.* 1 other"):
        check_image_files(records)


def test_a_sound_file_is_never_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr(checks, "read_image", forbidden)
    monkeypatch.setattr(Image.Image, "load", forbidden)
    for name in ("jpeg", "png", "palette", "alpha", "cmyk"):
        assert error_kind(record(tmp_path, GOOD[name], name)) is None
