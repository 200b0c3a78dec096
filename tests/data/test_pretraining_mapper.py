# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The mappers of pre-training and classification: which part, at which size, how augmented."""

import errno
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.testing import assert_close
from torchvision.transforms import RandomResizedCrop, v2

from qbheat_det.core import image_files
from qbheat_det.core.seeding import preserved_randomness, seed_place
from qbheat_det.data import DataError, PretrainingMapper
from qbheat_det.data.mappers import ClassificationMapper
from tests.data.pictures import draw, save


def record(path, **fields):
    return {"file_name": path, "image_id": 5, **fields}


def coordinates(width, height):
    """Pixels that say where they are: red the column, green the row, blue nothing."""
    y, x = np.mgrid[:height, :width]
    return np.stack([x, y, np.full_like(x, 7)], axis=2).astype(np.uint8)


@pytest.mark.parametrize(("size", "scale"), [(16, (0.2, 1.0)), (48, (1.0, 1.0)), (96, (0.05, 0.1))])
def test_parts_are_those_of_torchvision_from_the_same_seed(size, scale, tmp_path):
    pixels = draw(150, 110)
    path = save(tmp_path / "a.png", pixels)
    mapper = PretrainingMapper(size=size, scale=scale, flip="none")
    reference = RandomResizedCrop(size, scale, antialias=True)
    for seed in range(8):
        torch.manual_seed(seed)
        mapped = mapper(record(path))
        torch.manual_seed(seed)
        expected = reference(torch.from_numpy(pixels).permute(2, 0, 1))
        torch.testing.assert_close(mapped["image"].int(), expected.int(), rtol=0, atol=1)


def test_flips_are_fair_and_channels_in_the_order_of_the_format(tmp_path):
    path = save(tmp_path / "a.png", coordinates(100, 100))

    def directions(flip):
        mapper = PretrainingMapper(size=8, flip=flip)
        images = [mapper(record(path)) for _ in range(60)]
        found = set()
        for mapped in images:
            red, green = mapped["image"][0].int(), mapped["image"][1].int()
            found.add((bool(red[0, 0] > red[0, -1]), bool(green[0, 0] > green[-1, 0])))
        return found

    assert directions("none") == {(False, False)}
    assert directions("horizontal") == {(False, False), (True, False)}
    assert directions("vertical") == {(False, False), (False, True)}

    path = save(tmp_path / "a.png", np.full((9, 9, 3), (10, 20, 30), np.uint8))
    for pixel_format, expected in {"RGB": [10, 20, 30], "BGR": [30, 20, 10]}.items():
        mapped = PretrainingMapper(size=4, pixel_format=pixel_format)(record(path))
        assert mapped["image"].float().mean(dim=(1, 2)).tolist() == expected


@pytest.mark.parametrize("broken", ["half", "missing", "bomb"])
@pytest.mark.parametrize("is_train", [True, False])
def test_a_broken_image_is_an_error(broken, is_train, tmp_path, monkeypatch):
    path = Path(save(tmp_path / "a.jpg", draw(90, 60)))
    if broken == "half":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    elif broken == "missing":
        path.unlink()
    else:
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 90 * 60 // 3)
    mapper = PretrainingMapper(size=16, is_train=is_train)
    error = mapper(record(str(path)))
    assert isinstance(error, DataError)
    assert error.kind == "unreadable image"
    assert repr(str(path)) in error.where


def test_too_many_open_files_are_no_broken_image(tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError(errno.EMFILE, "Too many open files")

    path = save(tmp_path / "a.jpg", draw(90, 60))
    monkeypatch.setattr(image_files, "open", fail, raising=False)
    with pytest.raises(OSError, match="Too many"):
        PretrainingMapper(size=16)(record(str(path)))


MEAN, STD = (120.0, 110.0, 100.0), (60.0, 50.0, 40.0)


def classify(*, rand_augment=(), random_erasing=0.0, pixel_mean=MEAN, pixel_std=STD, **crop):
    return ClassificationMapper(
        crop=PretrainingMapper(**{"size": 48, "scale": (0.08, 1.0), **crop}),
        rand_augment=rand_augment,
        random_erasing=random_erasing,
        pixel_mean=pixel_mean,
        pixel_std=pixel_std,
    )


def map_image(mapper, path, *place):
    """The image that a mapper gives under the seed of a place."""
    with preserved_randomness():
        seed_place(*place)
        entry = mapper({"file_name": path, "image_id": 5, "label": 3})
    assert {key: entry[key] for key in entry if key != "image"} == {
        "file_name": path,
        "image_id": 5,
        "label": 3,
    }
    image = entry["image"]
    assert (image.dtype, image.shape, image.is_contiguous()) == (torch.uint8, (3, 48, 48), True)
    return image


@pytest.fixture(scope="module")
def photo(tmp_path_factory):
    return save(tmp_path_factory.mktemp("photo") / "a.png", draw(150, 110))


@pytest.mark.parametrize("test_crop", [0.875, 1.0])
def test_inference_is_torchvisions_resizing_and_centre_crop(tmp_path, test_crop):
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


def test_every_operation_of_rand_augment_works_at_every_magnitude(photo):
    for magnitude in (0, 10):
        mapper = classify(rand_augment=(magnitude, 1.0))
        for place in range(30):
            map_image(mapper, photo, 2, magnitude, place)


def test_erasing_fills_one_rectangle_with_noise_and_leaves_the_rest(photo):
    settings = {"pixel_mean": MEAN, "pixel_std": STD}
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


def test_channels_are_augmented_as_rgb_whatever_their_order_is(photo):
    # Random erasing aside: the noise of a channel is drawn in the channels' order.
    rgb = classify(rand_augment=(9, 0.5), pixel_mean=MEAN)
    bgr = classify(rand_augment=(9, 0.5), pixel_mean=MEAN[::-1], pixel_format="BGR")
    for place in range(10):
        assert_close(map_image(bgr, photo, place).flip(0), map_image(rgb, photo, place))
