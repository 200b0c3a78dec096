# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Sets of images in memory: what is kept, when, and that workers share it."""

import gc
import weakref
from pathlib import Path

import pytest
import torch
from detectron2.data.detection_utils import read_image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from qbheat_det.data import memory
from qbheat_det.data.memory import DecodedImages, decode_if_small
from tests.data.pictures import draw, save


def draw_set(folder: Path) -> dict[str, tuple[int, int]]:
    """Writes images of several sizes; returns their sizes as the headers say them."""
    sizes = {"a.jpg": (60, 40), "b.png": (33, 75), "c.jpg": (200, 320), "d.jpg": (90, 300)}
    turned = {"d.jpg": 6}
    return {
        save(folder / name, draw(*size), orientation=turned.get(name)): size
        for name, size in sizes.items()
    }


def whole(images: DecodedImages, name: str) -> Tensor:
    picture = images.get(name)
    assert picture is not None
    return picture.read((0, 0, picture.width, picture.height), 1)


def test_small_images_are_kept_as_they_are(tmp_path: Path) -> None:
    sizes = draw_set(tmp_path)
    images = DecodedImages(sizes, shorter_side=1000)
    assert len(images) == 4
    assert images.num_bytes == 3 * sum(width * height for width, height in sizes.values())
    for name in sizes:
        expected = torch.from_numpy(read_image(name, "RGB").copy())
        torch.testing.assert_close(whole(images, name), expected, rtol=0, atol=0)


def test_what_cannot_be_decoded_is_left_to_the_mapper(tmp_path: Path) -> None:
    sizes = draw_set(tmp_path)
    cut, gone, other, *_ = sizes
    Path(cut).write_bytes(Path(cut).read_bytes()[:900])
    Path(gone).unlink()
    sizes[other] = (5, 5)
    images = DecodedImages(sizes, shorter_side=100)
    assert len(images) == 1
    assert [images.get(name) is None for name in sizes] == [True, True, True, False]
    assert images.get("never heard of") is None


def test_the_budget_decides_to_the_byte(tmp_path: Path) -> None:
    names = list(draw_set(tmp_path))
    needed = 3 * (60 * 40 + 33 * 75 + 45 * 72 + 45 * 150)
    assert decode_if_small(names, shorter_side=45, budget=needed - 1) is None
    assert decode_if_small(names, shorter_side=45, budget=needed) is not None


def test_a_large_set_is_judged_by_a_few_headers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = save(tmp_path / "a.jpg", draw(50, 50))
    read: list[str] = []
    real = memory._read_size
    monkeypatch.setattr(memory, "_read_size", lambda path: read.append(path) or real(path))
    assert decode_if_small([name] * 100_000, shorter_side=50, budget=1e6) is None
    assert 32 <= len(read) <= 64


def test_a_second_loader_of_the_same_set_shares_its_images(tmp_path: Path) -> None:
    names = list(draw_set(tmp_path))
    one = decode_if_small(names, shorter_side=45, budget=1e6)
    assert one is not None
    assert decode_if_small(names, shorter_side=45, budget=1e6) is one
    assert decode_if_small(names, shorter_side=46, budget=1e6) is not one
    assert decode_if_small(names[:3], shorter_side=45, budget=1e6) is not one
    last = weakref.ref(one)
    del one
    gc.collect()
    assert last() is None  # nothing else holds the pixels


class _Addresses(Dataset[tuple[int, int]]):
    """Where a worker finds the pixels, and their sum."""

    def __init__(self, images: DecodedImages, names: list[str]) -> None:
        self._images = images
        self._names = names

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, index: int) -> tuple[int, int]:
        pixels = whole(self._images, self._names[index])
        return pixels.data_ptr(), int(pixels.sum())


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_see_the_same_pixels(start: str, tmp_path: Path) -> None:
    names = list(draw_set(tmp_path))
    dataset = _Addresses(DecodedImages(draw_set(tmp_path), shorter_side=45), names)
    here = [dataset[i] for i in range(len(names))]
    loader = DataLoader(dataset, batch_size=None, num_workers=1, multiprocessing_context=start)
    there = [(int(address), int(total)) for address, total in loader]
    assert [total for _, total in there] == [total for _, total in here]
    if start == "fork":
        assert there == here
