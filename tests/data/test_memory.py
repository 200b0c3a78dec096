# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Sets of images in memory: what is kept, when, and that workers share it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from detectron2.data.detection_utils import read_image
from torch import Tensor

from qbheat_det.data import images as reading
from qbheat_det.data.images import DecodedImages, decode_if_small
from tests.data.pictures import draw, save


def draw_set(folder: Path) -> dict[str, tuple[int, int]]:
    """Writes images of several sizes; returns their sizes as the headers say them."""
    sizes = {"a.jpg": (60, 40), "b.png": (33, 75), "c.jpg": (200, 320), "d.jpg": (90, 300)}
    turned = {"d.jpg": 6}
    return {
        save(folder / name, draw(*size), orientation=turned.get(name)): size
        for name, size in sizes.items()
    }


def _records(names: list[str]) -> list[dict[str, Any]]:
    return [{"file_name": name} for name in names]


def whole(images: DecodedImages, name: str) -> Tensor:
    image = images[name]
    return image.read((0, 0, image.width, image.height), 1)


def test_small_images_are_kept_as_they_are(tmp_path: Path) -> None:
    names = list(draw_set(tmp_path))
    images = DecodedImages(names, shorter_side=1000)
    for name in names:
        expected = torch.from_numpy(read_image(name, "RGB").copy())
        torch.testing.assert_close(whole(images, name), expected, rtol=0, atol=0)


def test_what_cannot_be_decoded_is_left_to_the_mapper(tmp_path: Path) -> None:
    cut, gone, *others = draw_set(tmp_path)
    Path(cut).write_bytes(Path(cut).read_bytes()[:900])
    Path(gone).unlink()
    assert list(DecodedImages([cut, gone, *others], shorter_side=100)) == others


def test_the_budget_decides_to_the_byte(tmp_path: Path) -> None:
    names = list(draw_set(tmp_path))
    needed = 3 * (60 * 40 + 33 * 75 + 45 * 72 + 45 * 150)
    assert decode_if_small(_records(names), shorter_side=45, budget=needed - 1) is None
    images = decode_if_small(_records(names), shorter_side=45, budget=needed)
    assert images is not None
    assert images.num_bytes == needed
    few = [*names[:1] * 200, names[2]]  # the sample does not see the large one
    assert decode_if_small(_records(few), shorter_side=1000, budget=201 * 60 * 40 * 3) is None


def test_a_large_set_is_judged_by_a_few_headers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = save(tmp_path / "a.jpg", draw(50, 50))
    monkeypatch.setattr(reading, "_decode", lambda *_, **__: pytest.fail("an image was decoded"))
    assert decode_if_small(_records([name]) * 100_000, shorter_side=50, budget=1e6) is None
