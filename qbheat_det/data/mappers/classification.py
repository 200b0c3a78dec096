# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The mapper for classification: random crop and flip, RandAugment and random erasing.

"RandAugment", arXiv:1909.13719, and "Random Erasing", arXiv:1708.04896, are from timm. The recipes
of the QB-Heat paper vary the magnitude of RandAugment randomly, which torchvision does not support.
"""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from detectron2.config import CfgNode, configurable
from PIL import Image
from timm.data.auto_augment import rand_augment_transform
from timm.data.random_erasing import RandomErasing
from torch import Tensor

from qbheat_det.data.checks import DataError, check_input_keys

from .pretraining import PretrainingMapper

_LARGEST_MAGNITUDE = 10  # on timm's scale
_LARGEST_DRAWN = 9.99  # at 10, posterizing would keep no bits, which Pillow does not support
_TRANSLATION = 0.45  # largest shift, relative to the side, as in timm


class ClassificationMapper:
    """Maps a record with ``file_name`` and ``label`` to a square image.

    Returns the same entry as ``PretrainingMapper``, or its ``DataError``. In training, RandAugment
    and random erasing are applied after the random crop and flip.
    """

    @configurable
    def __init__(
        self,
        *,
        crop: PretrainingMapper,
        rand_augment: Sequence[float] = (),
        random_erasing: float = 0.0,
        pixel_mean: Sequence[float] = (123.675, 116.28, 103.53),
        pixel_std: Sequence[float] = (58.395, 57.12, 57.375),
    ) -> None:
        """
        Args:
            crop: mapper that crops and flips. If it is for inference, nothing else is done.
            rand_augment: magnitude (an integer from 0 to 10) and its standard deviation; empty for
                no RandAugment.
            random_erasing: probability of replacing a rectangle by Gaussian noise.
            pixel_mean: mean of the noise, in the channel order of ``crop.pixel_format``.
            pixel_std: standard deviation of the noise.

        Raises:
            UserError: a value is invalid.
        """
        magnitude, deviation = rand_augment if len(rand_augment) == 2 else (-1, -1)
        is_pair = magnitude in range(_LARGEST_MAGNITUDE + 1) and deviation >= 0
        pair = f"empty or [whole number up to {_LARGEST_MAGNITUDE}, standard deviation]"
        check_input_keys(
            ("CLASSIFY.RAND_AUGMENT", rand_augment, not len(rand_augment) or is_pair, pair),
            ("CLASSIFY.RANDOM_ERASING", random_erasing, 0 <= random_erasing <= 1, "in [0, 1]"),
        )
        self._crop = crop
        self._is_bgr = crop.pixel_format == "BGR"
        self._augment = None
        if crop.is_train and rand_augment:
            mean = [round(value) for value in pixel_mean]
            self._augment = rand_augment_transform(
                f"rand-m{int(magnitude)}-mstd{deviation:f}-inc1",
                {
                    "translate_const": int(_TRANSLATION * crop.size),
                    "magnitude_max": _LARGEST_DRAWN,
                    "img_mean": tuple(reversed(mean) if self._is_bgr else mean),
                },
            )
        self._erasing = None
        if crop.is_train and random_erasing:
            self._erasing = random_erasing, RandomErasing(1.0, mode="pixel", device="cpu")
        self._mean, self._std = (
            torch.tensor(values, dtype=torch.float32).view(3, 1, 1)
            for values in (pixel_mean, pixel_std)
        )

    @classmethod
    def from_config(cls, cfg: CfgNode, is_train: bool = True) -> dict[str, Any]:
        keys = cfg.INPUT.CLASSIFY
        crop = PretrainingMapper.from_config(cfg, is_train)
        return {
            "crop": PretrainingMapper(**crop, test_crop=keys.TEST_CROP),
            "rand_augment": keys.RAND_AUGMENT,
            "random_erasing": keys.RANDOM_ERASING,
            "pixel_mean": cfg.MODEL.PIXEL_MEAN,
            "pixel_std": cfg.MODEL.PIXEL_STD,
        }

    def prepare(self, dataset_dicts: Sequence[dict[str, Any]]) -> None:
        self._crop.prepare(dataset_dicts)

    def __call__(self, dataset_dict: dict[str, Any]) -> dict[str, Any] | DataError:
        entry = self._crop(dataset_dict)
        if isinstance(entry, DataError):
            return entry
        if self._augment is not None:
            entry["image"] = self._rand_augment(entry["image"])
        # timm's probability is 1, and the decision is made here, to normalize only erased images.
        if self._erasing is not None and random.random() < self._erasing[0]:
            entry["image"] = self._erase(entry["image"])
        return entry

    def _rand_augment(self, image: Tensor) -> Tensor:
        """Applies RandAugment to an image (3, S, S), uint8."""
        assert self._augment is not None
        rgb = image.flip(0) if self._is_bgr else image
        picture = self._augment(Image.fromarray(rgb.permute(1, 2, 0).numpy()))
        pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1)
        return (pixels.flip(0) if self._is_bgr else pixels).contiguous()

    def _erase(self, image: Tensor) -> Tensor:
        """Erases a random rectangle of an image (3, S, S), uint8. Other pixels do not change."""
        assert self._erasing is not None
        normalised = (image.float() - self._mean) / self._std
        erased = self._erasing[1](normalised) * self._std + self._mean
        return erased.round().clamp(0, 255).to(torch.uint8)
