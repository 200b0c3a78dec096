# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The mapper of classification: its crop, its augmentation under a seed, and what it refuses."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from torchvision.transforms import v2

from qbheat_det.data import PretrainingMapper, preserved_randomness, seed_place
from qbheat_det.data.mappers import ClassificationMapper
from tests.data.pictures import draw, save

MEAN, STD = (120.0, 110.0, 100.0), (60.0, 50.0, 40.0)


def classify(
    *,
    rand_augment: Sequence[float] = (),
    random_erasing: float = 0.0,
    pixel_mean: Sequence[float] = MEAN,
    pixel_std: Sequence[float] = STD,
    **crop: Any,
) -> ClassificationMapper:
    return ClassificationMapper(
        crop=PretrainingMapper(**{"size": 48, "scale": (0.08, 1.0), **crop}),
        rand_augment=rand_augment,
        random_erasing=random_erasing,
        pixel_mean=pixel_mean,
        pixel_std=pixel_std,
    )


def map_image(mapper: Any, path: str, *place: int) -> Tensor:
    """The image that a mapper gives under the seed of a place."""
    with preserved_randomness():
        seed_place(*place)
        entry = mapper({"file_name": path, "image_id": 5, "label": 3})
    assert isinstance(entry, dict)
    assert {key: entry[key] for key in entry if key != "image"} == {
        "file_name": path,
        "image_id": 5,
        "label": 3,
    }
    image = entry["image"]
    assert isinstance(image, Tensor)
    assert (image.dtype, image.shape, image.is_contiguous()) == (torch.uint8, (3, 48, 48), True)
    return image


@pytest.fixture(scope="module")
def photo(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tmp_path_factory.mktemp("photo") / "a.png", draw(150, 110))


@pytest.mark.parametrize("test_crop", [0.875, 1.0])
def test_inference_is_torchvisions_resizing_and_centre_crop(
    tmp_path: Path, test_crop: float
) -> None:
    # A slope, on which a shift by a part of a pixel can be told, and is bounded.
    y, x = np.mgrid[:192, :256]
    path = save(tmp_path / "a.png", np.stack([x * 0.9, y * 1.2, x * 0], axis=2).astype(np.uint8))
    # Nothing is drawn.
    mapper = classify(
        test_crop=test_crop, is_train=False, rand_augment=(9, 0.5), random_erasing=1.0
    )
    reference = v2.Compose([v2.Resize(round(48 / test_crop), antialias=True), v2.CenterCrop(48)])
    pixels = torch.from_numpy(np.stack([x * 0.9, y * 1.2, x * 0]).astype(np.uint8))
    difference = map_image(mapper, path).int() - reference(pixels).int()
    assert int(difference.abs().max()) <= 4  # a pixel of the small image is 4 to 5 levels wide


def test_what_a_seed_draws_is_drawn_again_and_another_draws_otherwise(photo: str) -> None:
    mapper = classify(rand_augment=(9, 0.5), random_erasing=0.5)
    images = [map_image(mapper, photo, 1, place) for place in range(12)]
    for place in (0, 11):
        assert_close(map_image(mapper, photo, 1, place), images[place], rtol=0, atol=0)
    assert len({image.numpy().tobytes() for image in images}) == 12


def test_every_operation_of_rand_augment_works_at_every_magnitude(photo: str) -> None:
    for magnitude in (0, 10):
        mapper = classify(rand_augment=(magnitude, 1.0))
        for place in range(30):
            map_image(mapper, photo, 2, magnitude, place)


def test_erasing_fills_one_rectangle_with_noise_and_leaves_the_rest(photo: str) -> None:
    settings: dict[str, Any] = {"pixel_mean": MEAN, "pixel_std": STD}
    plain = classify(**settings)
    erasing = classify(**settings, random_erasing=1.0)
    values = []
    for place in range(60):
        before, after = (map_image(mapper, photo, 3, place) for mapper in (plain, erasing))
        changed = (before != after).any(dim=0)
        rows, columns = changed.any(dim=1).nonzero(), changed.any(dim=0).nonzero()
        box = (slice(rows.min(), rows.max() + 1), slice(columns.min(), columns.max() + 1))
        area = changed[box].numel() / changed.numel()
        assert 0.01 < area < 0.36  # 2 to 33 per cent, in whole pixels
        assert float(changed[box].float().mean()) > 0.98  # noise may hit what was there
        values.append(after[:, box[0], box[1]].flatten(1).float())
    # Noise of the pixels' mean and deviation, clipped to bytes.
    noise = torch.cat(values, dim=1)
    expected = torch.randn(3, 100_000, generator=torch.Generator().manual_seed(0))
    clipped = (expected * torch.tensor(STD)[:, None] + torch.tensor(MEAN)[:, None]).clamp(0, 255)
    assert_close(noise.mean(dim=1), clipped.mean(dim=1), rtol=0, atol=1.5)
    assert_close(noise.std(dim=1), clipped.std(dim=1), rtol=0.03, atol=0)


def test_channels_are_augmented_as_rgb_whatever_their_order_is(photo: str) -> None:
    # Random erasing aside: the noise of a channel is drawn in the channels' order.
    rgb = classify(rand_augment=(9, 0.5), pixel_mean=MEAN)
    bgr = classify(rand_augment=(9, 0.5), pixel_mean=MEAN[::-1], pixel_format="BGR")
    for place in range(10):
        assert_close(map_image(bgr, photo, place).flip(0), map_image(rgb, photo, place))
