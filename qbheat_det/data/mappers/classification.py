# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The mapper of classification: the random part of pre-training, RandAugment, random erasing.

"RandAugment", arXiv:1909.13719, and "Random Erasing", arXiv:1708.04896, are timm's. The QB-Heat
paper's recipes have a standard deviation of the magnitude, which torchvision's RandAugment lacks.
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

_LARGEST_MAGNITUDE = 10  # timm's scale
_LARGEST_DRAWN = 9.99  # at 10, posterising would leave no bit of an image, which Pillow refuses
_TRANSLATION = 0.45  # largest shift relative to the side, as in timm's recipes


class ClassificationMapper:
    """Maps a record with ``file_name`` and ``label`` to a square image.

    Returns the entry of ``PretrainingMapper``, or its ``DataError``. In training, RandAugment and
    random erasing follow the part and the flip.
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
            crop: draws the part and the flip. If it is for inference, nothing else is done.
            rand_augment: magnitude, a whole number from 0 to 10, and its standard deviation; or
                empty.
            random_erasing: probability of a rectangle of normal noise, clipped to bytes.
            pixel_mean: of the noise, for the channels of the crop's pixel format.
            pixel_std: of the noise.

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
        # Drawn here, so that only erased images are normalised.
        if self._erasing is not None and random.random() < self._erasing[0]:
            entry["image"] = self._erase(entry["image"])
        return entry

    def _rand_augment(self, image: Tensor) -> Tensor:
        """Maps (3, S, S), uint8, to the same."""
        assert self._augment is not None
        rgb = image.flip(0) if self._is_bgr else image
        picture = self._augment(Image.fromarray(rgb.permute(1, 2, 0).numpy()))
        pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1)
        return (pixels.flip(0) if self._is_bgr else pixels).contiguous()

    def _erase(self, image: Tensor) -> Tensor:
        """Maps (3, S, S), uint8, to the same; pixels outside the rectangle stay equal."""
        assert self._erasing is not None
        normalised = (image.float() - self._mean) / self._std
        erased = self._erasing[1](normalised) * self._std + self._mean
        return erased.round().clamp(0, 255).to(torch.uint8)
