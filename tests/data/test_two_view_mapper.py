# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The mapper of contrastive pre-training: two views that share the image and nothing else."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qbheat_det.data import PretrainingMapper
from qbheat_det.data.mappers import TwoViewMapper
from tests.data.pictures import draw, save

NONE: dict[str, Any] = {"jitter_probability": 0.0, "grey_probability": 0.0, "blur_probability": 0.0}


def mapped(mapper: Any, path: str, seed: int = 0, **fields: Any) -> dict[str, Any]:
    torch.manual_seed(seed)
    entry = mapper({"file_name": path, "image_id": 5, **fields})
    assert isinstance(entry, dict)
    return entry


def two_views(settings: Mapping[str, Any] = NONE, **crop: Any) -> TwoViewMapper:
    return TwoViewMapper(crop=PretrainingMapper(**{"size": 32, **crop}), **settings)


def alone(**probability: Any) -> TwoViewMapper:
    """One augmentation, and neither crop nor flip."""
    whole: dict[str, Any] = {"scale": (1.0, 1.0), "ratio": (1.0, 1.0), "flip": "none"}
    return two_views({**NONE, **probability}, **whole)


def blur_naively(image: np.ndarray, sigma: float) -> np.ndarray:
    """A Gaussian over the image (H, W) and its mirror image beyond the border, as one sum."""
    reach = 12
    weights = np.exp(-0.5 * (np.arange(-reach, reach + 1) / sigma) ** 2)
    weights /= weights.sum()
    wide = np.pad(image.astype(np.float64), reach, mode="reflect")
    rows = sum(w * wide[i : i + image.shape[0]] for i, w in enumerate(weights))
    return np.asarray(sum(w * rows[:, i : i + image.shape[1]] for i, w in enumerate(weights)))


def test_without_augmentation_the_views_are_two_draws_of_the_pre_training_mapper(
    tmp_path: Path,
) -> None:
    path = save(tmp_path / "a.png", draw(150, 110))
    single = PretrainingMapper(size=32)
    for seed in range(4):
        both = mapped(two_views(), path, seed)
        first = mapped(single, path, seed)
        second = single({"file_name": path})
        assert isinstance(second, dict)
        torch.testing.assert_close(both["image"], first["image"], rtol=0, atol=0)
        torch.testing.assert_close(both["image_key"], second["image"], rtol=0, atol=0)
        assert not torch.equal(both["image"], both["image_key"])


@pytest.mark.parametrize("sigma", [0.1, 0.7, 2.0])
def test_blur_is_a_gaussian_of_that_width(sigma: float, tmp_path: Path) -> None:
    pixels = draw(32, 32)
    mapper = alone(blur_probability=1.0, blur_sigma=(sigma, sigma))
    view = mapped(mapper, save(tmp_path / "a.png", pixels))["image"]
    for channel in range(3):
        expected = torch.from_numpy(blur_naively(pixels[..., channel], sigma))
        torch.testing.assert_close(view[channel].double(), expected, rtol=0, atol=1.0)


@pytest.mark.parametrize(
    ("name", "share"),
    [("grey_probability", 0.2), ("jitter_probability", 0.8), ("blur_probability", 0.5)],
)
def test_augmentations_are_as_frequent_as_they_say(name: str, share: float, tmp_path: Path) -> None:
    pixels = draw(32, 32)
    path = save(tmp_path / "a.png", pixels)
    mapper, same = alone(**{name: share}), torch.from_numpy(pixels).permute(2, 0, 1)
    views = [mapped(mapper, path, seed)["image_key"] for seed in range(100)]
    changed = sum(not torch.equal(view, same) for view in views)
    deviation = (share * (1 - share) * 100) ** 0.5
    # Of the narrowest blurs, one in ten leaves bytes as they were.
    assert share * 100 - 5 * deviation - 10 * (name[0] == "b") < changed
    assert changed < share * 100 + 5 * deviation


def test_channels_in_reverse_are_augmented_the_same(tmp_path: Path) -> None:
    path = save(tmp_path / "a.png", draw(60, 60))
    rgb, bgr = (two_views({}, pixel_format=order) for order in ("RGB", "BGR"))
    for seed in range(6):
        for key in ("image", "image_key"):
            expected = mapped(rgb, path, seed)[key].flip(0)
            torch.testing.assert_close(mapped(bgr, path, seed)[key], expected, rtol=0, atol=0)
            assert not torch.equal(mapped(rgb, path, seed + 100)[key].flip(0), expected)
