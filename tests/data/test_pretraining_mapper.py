# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The mapper of pre-training: which part, at which size, in which order of channels."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import RandomResizedCrop

from qbheat_det.config import get_cfg
from qbheat_det.data import DataError, PretrainingMapper
from tests.data.pictures import draw, save


def record(path: str, **fields: Any) -> dict[str, Any]:
    return {"file_name": path, "image_id": 5, **fields}


def coordinates(width: int, height: int) -> np.ndarray:
    """Pixels that say where they are: red the column, green the row, blue nothing."""
    y, x = np.mgrid[:height, :width]
    return np.stack([x, y, np.full_like(x, 7)], axis=2).astype(np.uint8)


@pytest.mark.parametrize(("size", "scale"), [(16, (0.2, 1.0)), (48, (1.0, 1.0)), (96, (0.05, 0.1))])
def test_parts_are_those_of_torchvision_from_the_same_seed(
    size: int, scale: tuple[float, float], tmp_path: Path
) -> None:
    pixels = draw(150, 110)
    path = save(tmp_path / "a.png", pixels)
    mapper = PretrainingMapper(size=size, scale=scale, flip="none")
    reference = RandomResizedCrop(size, scale, antialias=True)
    for seed in range(8):
        torch.manual_seed(seed)
        mapped = mapper(record(path))
        torch.manual_seed(seed)
        expected = reference(torch.from_numpy(pixels).permute(2, 0, 1))
        assert isinstance(mapped, dict)
        torch.testing.assert_close(mapped["image"].int(), expected.int(), rtol=0, atol=1)


def test_flips_are_fair_and_as_asked_for(tmp_path: Path) -> None:
    path = save(tmp_path / "a.png", coordinates(100, 100))

    def directions(flip: str) -> set[tuple[bool, bool]]:
        mapper = PretrainingMapper(size=8, flip=flip)
        images = [mapper(record(path)) for _ in range(60)]
        found = set()
        for mapped in images:
            assert isinstance(mapped, dict)
            red, green = mapped["image"][0].int(), mapped["image"][1].int()
            found.add((bool(red[0, 0] > red[0, -1]), bool(green[0, 0] > green[-1, 0])))
        return found

    assert directions("none") == {(False, False)}
    assert directions("horizontal") == {(False, False), (True, False)}
    assert directions("vertical") == {(False, False), (False, True)}


def test_the_channels_are_in_the_order_of_the_format(tmp_path: Path) -> None:
    path = save(tmp_path / "a.png", np.full((9, 9, 3), (10, 20, 30), np.uint8))
    for pixel_format, expected in {"RGB": [10, 20, 30], "BGR": [30, 20, 10]}.items():
        mapped = PretrainingMapper(size=4, pixel_format=pixel_format)(record(path))
        assert isinstance(mapped, dict)
        assert mapped["image"].float().mean(dim=(1, 2)).tolist() == expected


@pytest.mark.parametrize(("width", "height"), [(90, 60), (60, 91), (40, 40)])
def test_inference_takes_the_largest_square_in_the_middle(
    width: int, height: int, tmp_path: Path
) -> None:
    pixels = coordinates(width, height)
    path = save(tmp_path / "a.png", pixels)
    side = min(width, height)
    left, top = (width - side) // 2, (height - side) // 2
    mapped = PretrainingMapper(size=side, is_train=False)(record(path))
    assert isinstance(mapped, dict)
    expected = torch.from_numpy(pixels[top : top + side, left : left + side].copy())
    torch.testing.assert_close(mapped["image"], expected.permute(2, 0, 1), rtol=0, atol=0)


@pytest.mark.parametrize("orientation", [1, 6])
def test_parts_from_memory_are_those_from_the_file(orientation: int, tmp_path: Path) -> None:
    path = save(tmp_path / "a.png", draw(90, 70), orientation=orientation)
    from_file, from_memory = (PretrainingMapper(size=32, memory_gb=gb) for gb in (0, 1))
    for mapper in (from_file, from_memory):
        mapper.prepare([record(path)])
    assert from_file._memory is None
    assert from_memory._memory is not None
    for seed in range(5):
        torch.manual_seed(seed)
        expected = from_file(record(path))
        torch.manual_seed(seed)
        found = from_memory(record(path))
        assert isinstance(expected, dict)
        assert isinstance(found, dict)
        torch.testing.assert_close(found["image"], expected["image"], rtol=0, atol=0)


def test_no_part_from_memory_has_fewer_pixels_than_the_model_sees(tmp_path: Path) -> None:
    path = save(tmp_path / "a.jpg", draw(700, 400))
    mapper = PretrainingMapper(size=32, scale=(0.2, 0.2), memory_gb=1)
    mapper.prepare([record(path)])
    assert mapper._memory is not None
    picture = mapper._memory.get(path)
    assert picture is not None
    assert picture.read((0, 0, 700, 400), 1).shape[0] == math.ceil(32 / math.sqrt(0.2 * 3 / 4))
    for _ in range(50):
        assert min(picture.read(mapper._choose_box(700, 400), 32).shape[:2]) >= 32


@pytest.mark.parametrize("broken", ["half", "missing", "bomb"])
@pytest.mark.parametrize(("memory_gb", "is_train"), [(0, True), (1, False)])
def test_a_broken_image_is_an_error(
    broken: str, memory_gb: float, is_train: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(save(tmp_path / "a.jpg", draw(90, 60)))
    if broken == "half":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    elif broken == "missing":
        path.unlink()
    else:
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 90 * 60 // 3)
    mapper = PretrainingMapper(size=16, memory_gb=memory_gb, is_train=is_train)
    mapper.prepare([record(str(path))])
    error = mapper(record(str(path)))
    assert isinstance(error, DataError)
    assert error.kind == "unreadable image"
    assert repr(str(path)) in error.where


def test_fixed_views_are_of_the_pixels_in_the_file_whatever_fits_into_memory() -> None:
    cfg = get_cfg()
    assert PretrainingMapper.from_config(cfg)["memory_gb"] > 0
    cfg.INPUT.FIXED_VIEWS.COUNT = 2
    assert PretrainingMapper.from_config(cfg)["memory_gb"] == 0
