# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Parts of image files, the right ones, of every format."""

import ast
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from detectron2.data.detection_utils import read_image
from PIL import Image, UnidentifiedImageError

from qbheat_det.core.errors import UserError
from qbheat_det.core.files import get_cache_dir
from qbheat_det.data import find_image_errors
from qbheat_det.data.images import check_depth, open_image, resize
from qbheat_det.data.images import read_image as read_our_image
from qbheat_det.inference.images import read_rgb
from tests.data.pictures import draw, make_jpeg_of_scans, save

WIDTH, HEIGHT = 90, 60
BOX = (11, 7, 53, 44)
ALL = 10**6  # more pixels than there are: nothing is reduced


def read(path, box=BOX, at_least=ALL):
    with open_image(path) as image:
        return image.read(box, at_least)


def cut(pixels, box=BOX):
    left, top, right, bottom = box
    return torch.from_numpy(np.ascontiguousarray(pixels[top:bottom, left:right]))


@pytest.mark.parametrize("orientation", [None, *range(10)])
@pytest.mark.parametrize("suffix", [".jpg", ".png"])
def test_a_part_is_that_of_the_image_as_detectron2_turns_it(suffix, orientation, tmp_path):
    path = save(tmp_path / f"a{suffix}", draw(WIDTH, HEIGHT), orientation=orientation)
    whole = read_image(path, "RGB")
    with open_image(path) as image:
        assert (image.height, image.width) == whole.shape[:2]
        torch.testing.assert_close(image.read(BOX, ALL), cut(whole), rtol=0, atol=0)


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "RGBA", "LA", "1"])
@pytest.mark.parametrize("ending", ["png", "webp"])
def test_every_kind_of_pixels_becomes_rgb_as_in_detectron2(mode, ending, tmp_path):
    options = {"lossless": True} if ending == "webp" else {}
    path = save(tmp_path / f"a.{ending}", draw(WIDTH, HEIGHT), mode=mode, **options)
    torch.testing.assert_close(read(path), cut(read_image(path, "RGB")), rtol=0, atol=0)


@pytest.mark.parametrize(("type_", "mode"), [(np.float32, "F"), (np.int32, "I")])
def test_values_of_no_known_range_are_refused(type_, mode, tmp_path):
    path = save(tmp_path / "a.tif", np.ones((HEIGHT, WIDTH), type_), mode=mode)
    with pytest.raises(ValueError, match=mode):
        read(path)


def test_a_format_that_would_start_another_program_is_not_opened(tmp_path):
    Image.fromarray(draw(WIDTH, HEIGHT)).save(tmp_path / "a.jpg", "EPS")
    with pytest.raises(OSError):
        read(str(tmp_path / "a.jpg"))


def test_the_reduction_is_the_largest_that_leaves_enough_pixels(tmp_path):
    path = save(tmp_path / "a.jpg", draw(603, 601))
    for side, at_least, expected in (
        (64, 64, 64), (127, 64, 127), (128, 64, 64), (255, 64, 128), (512, 64, 64), (600, 8, 75)
    ):  # fmt: skip
        part = read(path, (0, 0, side, side + 1), at_least)
        assert part.shape[1] == expected
        assert part.shape[0] in (expected, expected + 1)


@pytest.mark.parametrize(("reduction", "side", "bound"), [(2, 64, 4), (4, 96, 2), (8, 64, 4)])
def test_reduced_decoding_equals_full_decoding_up_to_resampling(reduction, side, bound, tmp_path):
    # The waves are shorter than photographs': 64 of 64 pixels is the hardest that can happen.
    size = reduction * side
    path = save(tmp_path / "a.jpg", draw(size + 80, size + 40), quality=95)
    box = (3 * reduction, reduction, 3 * reduction + size, reduction + size)
    reduced, full = read(path, box, at_least=64), read(path, box)
    assert (reduced.shape[0], full.shape[0]) == (side, size)
    difference = (resize(reduced, 64, 64).float() - resize(full, 64, 64).float()).abs()
    assert difference.mean() < bound
    naive = full.double().unflatten(0, (side, reduction)).unflatten(2, (side, reduction))
    naive = naive.mean(dim=(1, 3))
    assert (reduced - naive).abs().mean() < 1.5
    assert (reduced[1:] - naive[:-1]).abs().mean() > 3  # as it would be a pixel further on


@pytest.mark.parametrize("size", [(40, 40), (41, 97), (300, 20)])
def test_resizing_is_pillows_antialiased_bilinear(size):
    pixels = draw(*size)
    expected = np.array(Image.fromarray(pixels).resize((48, 32), Image.Resampling.BILINEAR))
    found = resize(torch.from_numpy(pixels), 32, 48).permute(1, 2, 0)
    torch.testing.assert_close(found.int(), torch.from_numpy(expected).int(), rtol=0, atol=1)


def test_the_cache_folder_follows_the_environment(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("QBHEAT_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert get_cache_dir() == Path("/home/someone/.cache/qbheat_det")
    monkeypatch.setenv("XDG_CACHE_HOME", "/scratch/cache")
    assert get_cache_dir() == Path("/scratch/cache/qbheat_det")
    monkeypatch.setenv("QBHEAT_CACHE", "~/cache")
    assert get_cache_dir() == Path("/home/someone/cache")


def test_every_opening_of_an_image_names_its_formats():
    """Pillow starts Ghostscript for an EPS, also if its name ends in .png."""
    openings = []
    for root in ("qbheat_det", "tools"):
        for path in (Path(__file__).resolve().parents[2] / root).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Image.open"):
                    openings.append(path.name)
                    assert any(keyword.arg == "formats" for keyword in node.keywords), path
    assert len(openings) >= 4


def test_an_eps_named_png_starts_no_program(tmp_path, monkeypatch):
    path = tmp_path / "a.png"
    path.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n")
    monkeypatch.setattr("subprocess.Popen", None)
    for read in (lambda: read_our_image(str(path)), lambda: check_depth(str(path))):
        with pytest.raises(UnidentifiedImageError, match="JPEG"):
            read()
    (error,) = find_image_errors([{"file_name": str(path), "width": 8, "height": 8}])
    assert "JPEG" in error.reason


def test_scans_are_counted_up_to_the_end_of_the_picture(tmp_path):
    many, few, motion = (tmp_path / name for name in ("many.jpg", "few.jpg", "motion.jpg"))
    many.write_bytes(make_jpeg_of_scans(51, (64, 48)))
    few.write_bytes(make_jpeg_of_scans(50, (64, 48)))
    # Phones append a video, in which the marker of a scan occurs by chance.
    motion.write_bytes(few.read_bytes() + b"\xff\xda\x01" * 100)
    for path in (few, motion):
        assert read_our_image(str(path), "RGB").shape == (48, 64, 3)
    with pytest.raises(ValueError, match="more than 50 scans"):
        read_our_image(str(many), "RGB")
    with open_image(str(many)) as image, pytest.raises(ValueError, match="more than 50 scans"):
        image.decode(reduction=2)
    records = [{"file_name": str(path)} for path in (many, few, motion)]
    (error,) = find_image_errors(records)
    assert "many.jpg" in error.where


def test_a_pipe_is_no_image(tmp_path):
    path = tmp_path / "pipe.jpg"
    os.mkfifo(path)  # opening it would wait until another process writes to it
    (error,) = find_image_errors([{"file_name": str(path)}])
    assert "not a regular file" in error.reason
    with pytest.raises(UserError, match="not a regular file"):
        read_rgb(path)
