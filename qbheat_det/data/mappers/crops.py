# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The mappers for pre-training and classification, which return square crops of an image.

Random crops are those of torchvision's ``RandomResizedCrop``, from "Going deeper with
convolutions", arXiv:1409.4842.

Contrastive pre-training uses the augmentations of MoCo v2, arXiv:2003.04297: random crop, flip,
color jitter, grayscale and blur. Two details differ from MoCo's code: colors are changed in uint8
images, and the radius of the blur kernel is three standard deviations.

Classification uses RandAugment, arXiv:1909.13719, and random erasing, arXiv:1708.04896, of timm.
The recipes of the QB-Heat paper draw the magnitude of RandAugment at random, which torchvision does
not support.
"""

import math
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from detectron2.config import CfgNode
from PIL import Image
from timm.data.auto_augment import rand_augment_transform
from timm.data.random_erasing import RandomErasing
from torch import Tensor
from torchvision.transforms import RandomResizedCrop, v2
from torchvision.transforms.v2 import functional as F

from qbheat_det.config import configurable
from qbheat_det.data.checks import DataError, check_input_keys
from qbheat_det.data.images import Box, name_unreadable, open_image, resize

# The augmentations of MoCo v2.
JITTER = (0.4, 0.4, 0.4, 0.1)
"""Largest changes of brightness, contrast, saturation and hue."""
BLUR_SIGMA = (0.1, 2.0)
"""[min, max] of a blur's standard deviation, in pixels."""
_JITTER_PROBABILITY = 0.8
_GREY_PROBABILITY = 0.2
_BLUR_PROBABILITY = 0.5
_BLUR_RADIUS = 3.0  # radius of the blur's kernel, in standard deviations

_ASPECT_RATIO = (3 / 4, 4 / 3)  # [min, max] of width / height of a random crop
_FLIPPED_DIMS: dict[str, tuple[int, ...]] = {"none": (), "horizontal": (2,), "vertical": (1,)}
_COPIED_KEYS = ("file_name", "image_id", "label", "place")

# RandAugment in timm.
_MAX_MAGNITUDE = 10
_MAX_DRAWN_MAGNITUDE = 9.99  # at 10, posterizing would keep no bits, which Pillow does not support
_MAX_TRANSLATION = 0.45  # largest shift of the image, relative to its side


class PretrainingMapper:
    """Maps a record with ``file_name`` to a square image.

    In training, the image is a random crop, which is flipped at random. The random numbers are from
    torch's global generator. In inference, the image is the central square.

    Calling the mapper returns a dict with ``image`` (3, S, S), uint8, in the channel order of
    ``INPUT.FORMAT``. The keys ``file_name``, ``image_id``, ``label`` and ``place`` (the name of the
    visible quarter) are copied from the record if they exist. If the image cannot be read, a
    ``DataError`` is returned. If too many files are open, an ``OSError`` is raised.
    """

    @configurable
    def __init__(
        self,
        *,
        size: int,
        scale: Sequence[float] = (0.2, 1.0),
        flip: str = "horizontal",
        pixel_format: str = "RGB",
        test_crop: float = 1.0,
        is_train: bool = True,
    ) -> None:
        """
        Args:
            size: side S of the output in pixels.
            scale: [min, max] of the area of a crop, relative to the image.
            flip: "none", or the direction of flips with probability 1/2: "horizontal", "vertical".
            pixel_format: channel order, "RGB" or "BGR".
            test_crop: side of the central square in inference, relative to the shorter side.
            is_train: whether crops and flips are random.

        Raises:
            UserError: a value is invalid.
        """
        is_scale = len(scale) == 2 and 0 < scale[0] <= scale[1] <= 1
        check_input_keys(
            ("PRETRAIN.SCALE", scale, is_scale, "[min, max] with 0 < min <= max <= 1"),
            ("PRETRAIN.SIZE", size, size >= 1, "at least 1 pixel"),
            ("CLASSIFY.TEST_CROP", test_crop, 0 < test_crop <= 1, "above 0 and at most 1"),
            ("RANDOM_FLIP", flip, flip in _FLIPPED_DIMS, f"one of {', '.join(_FLIPPED_DIMS)}"),
            ("FORMAT", pixel_format, pixel_format in ("RGB", "BGR"), "RGB or BGR"),
        )
        self.size = size
        self.scale = (scale[0], scale[1])
        self.test_crop = test_crop
        self.is_train = is_train
        self.pixel_format = pixel_format
        self._flipped_dims = _FLIPPED_DIMS[flip]

    @classmethod
    def from_config(cls, cfg: CfgNode, is_train: bool = True) -> dict[str, Any]:
        keys = cfg.INPUT.PRETRAIN
        return {
            "size": keys.SIZE,
            "scale": keys.SCALE,
            "flip": cfg.INPUT.RANDOM_FLIP,
            "pixel_format": cfg.INPUT.FORMAT,
            "is_train": is_train,
        }

    def __call__(self, dataset_dict: dict[str, Any]) -> dict[str, Any] | DataError:
        file_name = dataset_dict["file_name"]
        try:
            with open_image(file_name) as picture:
                box = self._choose_box(picture.width, picture.height)
                pixels = picture.read(box, at_least=self.size)  # (h, w, 3)
        except Exception as error:  # the type depends on the format's decoder
            return name_unreadable(file_name, error)
        image = resize(pixels, self.size, self.size)  # (3, S, S)
        # All dimensions are reversed in one step, as each ``flip`` copies the image.
        reversed_dims: tuple[int, ...] = ()
        if self.pixel_format == "BGR":
            reversed_dims += (0,)  # the channels
        if self.is_train and self._flipped_dims and torch.rand(()) < 0.5:
            reversed_dims += self._flipped_dims
        if reversed_dims:
            image = image.flip(reversed_dims)
        copied = {key: dataset_dict[key] for key in _COPIED_KEYS if key in dataset_dict}
        return {**copied, "image": image.contiguous()}

    def _choose_box(self, image_width: int, image_height: int) -> Box:
        """Returns the crop: the central square in inference, or a random box in training."""
        if not self.is_train:
            side = max(1, round(self.test_crop * min(image_width, image_height)))
            left = (image_width - side) // 2
            top = (image_height - side) // 2
            return left, top, left + side, top + side
        # torchvision only looks at the size of this tensor, which has no memory.
        without_pixels = torch.empty(3, image_height, image_width, device="meta")
        top, left, height, width = RandomResizedCrop.get_params(
            without_pixels, list(self.scale), list(_ASPECT_RATIO)
        )
        return left, top, left + width, top + height


class TwoViewMapper:
    """Maps a record with ``file_name`` to two augmented views of the image.

    In training, calling the mapper returns a dict with the views ``image`` and ``image_key``, both
    (3, S, S), uint8. They are augmented independently of each other. In inference, it returns only
    ``image``, which is not augmented. The other keys are those of ``PretrainingMapper``. If the
    image cannot be read, a ``DataError`` is returned.
    """

    @configurable
    def __init__(self, *, crop: PretrainingMapper) -> None:
        """``crop`` crops and flips images. Its ``is_train`` selects training or inference."""
        self._crop = crop
        changes = [
            v2.RandomApply([v2.ColorJitter(*JITTER)], p=_JITTER_PROBABILITY),
            v2.RandomGrayscale(p=_GREY_PROBABILITY),
            v2.RandomApply([_blur], p=_BLUR_PROBABILITY),
        ]
        self._augment = ColourChange(v2.Compose(changes), crop.pixel_format)

    @classmethod
    def from_config(cls, cfg: CfgNode, is_train: bool = True) -> dict[str, Any]:
        return {"crop": PretrainingMapper(cfg, is_train)}

    def __call__(self, dataset_dict: dict[str, Any]) -> dict[str, Any] | DataError:
        entry = self._crop(dataset_dict)
        if isinstance(entry, DataError) or not self._crop.is_train:
            return entry
        second = self._crop(dataset_dict)
        if isinstance(second, DataError):
            return second
        query = self._augment(entry["image"])
        key = self._augment(second["image"])
        return {**entry, "image": query, "image_key": key}


class ColourChange:
    """Applies a transform of RGB images to images (3, H, W), uint8, in RGB or BGR."""

    def __init__(self, change: Callable[[Tensor], Tensor], pixel_format: str) -> None:
        """
        Args:
            change: the transform of an RGB image (3, H, W).
            pixel_format: channel order of the images, "RGB" or "BGR".
        """
        self._change = change
        self._is_rgb = pixel_format == "RGB"

    def __call__(self, image: Tensor) -> Tensor:
        if self._is_rgb:
            return self._change(image).contiguous()
        return self._change(image.flip(0)).flip(0).contiguous()


def _blur(image: Tensor) -> Tensor:
    """Blurs an image (3, S, S), uint8, by a Gaussian of random standard deviation."""
    sigma = float(torch.empty(()).uniform_(*BLUR_SIGMA))
    # A larger radius than the image's side would only take more time.
    radius = min(math.ceil(_BLUR_RADIUS * sigma), image.shape[-1] - 1)
    kernel_size = 2 * radius + 1
    return F.gaussian_blur(image, [kernel_size, kernel_size], [sigma, sigma])


def _apply_to_pillow(change: Callable[[Image.Image], Image.Image], image: Tensor) -> Tensor:
    """Applies a transform of Pillow's images to an image (3, S, S), uint8."""
    pixels = image.permute(1, 2, 0).numpy()  # (S, S, 3)
    changed = change(Image.fromarray(pixels))
    return torch.from_numpy(np.array(changed)).permute(2, 0, 1)


class ClassificationMapper:
    """Maps a record with ``file_name`` and ``label`` to a square image.

    In training, RandAugment and random erasing are applied after the random crop and flip. In
    inference, the image is the central square.

    Calling the mapper returns a dict with ``image`` (3, S, S), uint8, and the keys that
    ``PretrainingMapper`` copies. If the image cannot be read, a ``DataError`` is returned.
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
            crop: crops and flips images. Its ``is_train`` selects training or inference.
            rand_augment: magnitude (an integer from 0 to 10) and its standard deviation; empty for
                no RandAugment.
            random_erasing: probability of replacing a rectangle by Gaussian noise.
            pixel_mean: mean of the noise, in the channel order of ``crop.pixel_format``.
            pixel_std: standard deviation of the noise.

        Raises:
            UserError: a value is invalid.
        """
        is_pair = (
            len(rand_augment) == 2
            and rand_augment[0] in range(_MAX_MAGNITUDE + 1)
            and rand_augment[1] >= 0
        )
        is_valid = len(rand_augment) == 0 or is_pair
        valid_values = f"empty or [whole number up to {_MAX_MAGNITUDE}, standard deviation]"
        check_input_keys(
            ("CLASSIFY.RAND_AUGMENT", rand_augment, is_valid, valid_values),
            ("CLASSIFY.RANDOM_ERASING", random_erasing, 0 <= random_erasing <= 1, "in [0, 1]"),
        )
        self._crop = crop
        self._augment = None
        if crop.is_train and rand_augment:
            magnitude, deviation = rand_augment
            mean = [round(value) for value in pixel_mean]
            if crop.pixel_format == "BGR":
                mean.reverse()
            change = rand_augment_transform(
                f"rand-m{int(magnitude)}-mstd{deviation:f}-inc1",
                {
                    "translate_const": int(_MAX_TRANSLATION * crop.size),
                    "magnitude_max": _MAX_DRAWN_MAGNITUDE,
                    "img_mean": tuple(mean),
                },
            )
            self._augment = ColourChange(partial(_apply_to_pillow, change), crop.pixel_format)
        self._erasing_probability = 0.0
        if crop.is_train:
            self._erasing_probability = random_erasing
        # With probability 1, as ``__call__`` decides whether to erase. Other images need not be
        # normalized.
        self._erase = RandomErasing(1.0, mode="pixel", device="cpu")
        self._mean = torch.tensor(pixel_mean, dtype=torch.float32).view(3, 1, 1)
        self._std = torch.tensor(pixel_std, dtype=torch.float32).view(3, 1, 1)

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

    def __call__(self, dataset_dict: dict[str, Any]) -> dict[str, Any] | DataError:
        entry = self._crop(dataset_dict)
        if isinstance(entry, DataError):
            return entry
        if self._augment is not None:
            entry["image"] = self._augment(entry["image"])
        if self._erasing_probability and random.random() < self._erasing_probability:
            normalised = (entry["image"].float() - self._mean) / self._std
            erased = self._erase(normalised) * self._std + self._mean
            # Rounding restores the pixels outside the erased rectangle.
            entry["image"] = erased.round().clamp(0, 255).to(torch.uint8)
        return entry
