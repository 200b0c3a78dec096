# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The mappers of pre-training: one or two random parts of an image, resized to a square.

The random part is that of "Going deeper with convolutions", arXiv:1409.4842, as torchvision's
``RandomResizedCrop`` draws it. Contrastive pre-training has MoCo-v2's augmentations,
arXiv:2003.04297: a random part, a flip, colour jitter, grey, blur. Two details differ: torchvision
changes colours on bytes, and the blur's kernel ends at three standard deviations.
"""

import errno
import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from detectron2.config import CfgNode, configurable
from torch import Tensor
from torchvision.transforms import RandomResizedCrop, v2
from torchvision.transforms.v2 import functional as F

from qbheat_det.core.errors import UserError
from qbheat_det.core.text import one_line
from qbheat_det.data.checks import DataError, check_input_keys
from qbheat_det.data.images import Box, ImageInMemory, decode_if_small, open_image, resize

_FLIPS: dict[str, tuple[int, ...]] = {"none": (), "horizontal": (2,), "vertical": (1,)}
_REACH = 3.0  # radius of a blur's kernel, in standard deviations
_KEPT = ("file_name", "image_id", "label", "place")
_OF_THE_PROCESS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # errors of no particular file


class PretrainingMapper:
    """Maps a record with ``file_name`` to a square image.

    Returns ``image`` (3, S, S), uint8, in the channel order of ``INPUT.FORMAT``, and the record's
    ``file_name``, ``image_id``, ``label`` and ``place`` (of the visible quarter), if it has them.
    Training draws a part and a flip from torch's global generator. Inference takes the largest
    square in the middle, or a share of it. Returns a ``DataError`` for an image that cannot be
    read, and raises an ``OSError`` for too many open files.
    """

    @configurable
    def __init__(
        self,
        *,
        size: int,
        scale: Sequence[float] = (0.2, 1.0),
        ratio: Sequence[float] = (3 / 4, 4 / 3),
        flip: str = "horizontal",
        pixel_format: str = "RGB",
        memory_gb: float = 0.0,
        test_crop: float = 1.0,
        is_train: bool = True,
    ) -> None:
        """
        Args:
            size: side S of the result, in pixels.
            scale: smallest and largest share of the image's area.
            ratio: smallest and largest width over height, drawn uniformly in its logarithm.
            flip: "none", or "horizontal" or "vertical" for half of the images.
            pixel_format: "RGB" or "BGR".
            memory_gb: a set that takes less than this when decoded stays in memory, in GB.
            test_crop: in inference, side of the square relative to the image's shorter side.
            is_train: whether parts are random.

        Raises:
            UserError: a value is invalid.
        """
        is_scale = len(scale) == 2 and 0 < scale[0] <= scale[1] <= 1
        is_ratio = len(ratio) == 2 and 0 < ratio[0] <= ratio[1]
        check_input_keys(
            ("PRETRAIN.SCALE", scale, is_scale, "[min, max] with 0 < min <= max <= 1"),
            ("PRETRAIN.RATIO", ratio, is_ratio, "[min, max] with 0 < min <= max"),
            ("PRETRAIN.SIZE", size, size >= 1, "at least 1 pixel"),
            ("PRETRAIN.MEMORY_GB", memory_gb, memory_gb >= 0, "0 or more"),
            ("CLASSIFY.TEST_CROP", test_crop, 0 < test_crop <= 1, "above 0 and at most 1"),
            ("RANDOM_FLIP", flip, flip in _FLIPS, f"one of {', '.join(_FLIPS)}"),
            ("FORMAT", pixel_format, pixel_format in ("RGB", "BGR"), "RGB or BGR"),
        )
        self.size = size
        self.scale = scale[0], scale[1]
        self.ratio = ratio[0], ratio[1]
        self.test_crop = test_crop
        self.is_train = is_train
        self.pixel_format = pixel_format
        self._flipped = _FLIPS[flip]
        self._reversed = (0,) if pixel_format == "BGR" else ()
        self._memory_gb = memory_gb
        self._memory: dict[str, ImageInMemory] = {}

    @classmethod
    def from_config(cls, cfg: CfgNode, is_train: bool = True) -> dict[str, Any]:
        keys = cfg.INPUT.PRETRAIN
        # Images in memory may be scaled down, but fixed views must be equal on every machine.
        is_fixed = cfg.INPUT.FIXED_VIEWS.COUNT > 0
        return {
            "size": keys.SIZE,
            "scale": keys.SCALE,
            "ratio": keys.RATIO,
            "flip": cfg.INPUT.RANDOM_FLIP,
            "pixel_format": cfg.INPUT.FORMAT,
            "memory_gb": 0.0 if is_fixed else keys.MEMORY_GB,
            "is_train": is_train,
        }

    def prepare(self, dataset_dicts: Sequence[dict[str, Any]]) -> None:
        """Decodes all images if they fit into memory; called once, before workers start."""
        # Even the smallest part has at least S pixels.
        smallest = math.sqrt(self.scale[0] * min(self.ratio[0], 1 / self.ratio[1]))
        self._memory = decode_if_small(
            dataset_dicts,
            shorter_side=math.ceil(self.size / smallest),
            budget=self._memory_gb * 1e9,
        )

    def __call__(self, dataset_dict: dict[str, Any]) -> dict[str, Any] | DataError:
        file_name = dataset_dict["file_name"]
        try:
            decoded = self._memory.get(file_name)
            with nullcontext(decoded) if decoded else open_image(file_name) as picture:
                box = self._choose_box(picture.width, picture.height)
                pixels = picture.read(box, self.size)
        except (MemoryError, UserError):  # a missing shard is no broken image
            raise
        except Exception as error:  # the type depends on the format's decoder
            if isinstance(error, OSError) and error.errno in _OF_THE_PROCESS:
                raise
            reason = f"{type(error).__name__}: {one_line(error)}"
            return DataError("unreadable image", f"image {file_name!r}", reason)
        is_flipped = self.is_train and bool(self._flipped) and bool(torch.rand(()) < 0.5)
        reverse = self._reversed + (self._flipped if is_flipped else ())
        image = resize(pixels, self.size, self.size)
        image = image.flip(reverse) if reverse else image
        kept = {key: dataset_dict[key] for key in _KEPT if key in dataset_dict}
        return {**kept, "image": image.contiguous()}

    def _choose_box(self, width: int, height: int) -> Box:
        if not self.is_train:
            side = max(1, round(self.test_crop * min(width, height)))
            left, top = (width - side) // 2, (height - side) // 2
            return left, top, left + side, top + side
        without_pixels = torch.empty(3, height, width, device="meta")
        top, left, tall, wide = RandomResizedCrop.get_params(
            without_pixels, list(self.scale), list(self.ratio)
        )
        return left, top, left + wide, top + tall


class TwoViewMapper:
    """Maps a record with ``file_name`` to two views of the image.

    Returns the entry of ``PretrainingMapper``. In training it also has a second view, ``image_key``
    (3, S, S), uint8, drawn independently from torch's global generator.
    """

    @configurable
    def __init__(
        self,
        *,
        crop: PretrainingMapper,
        jitter: Sequence[float] = (0.4, 0.4, 0.4, 0.1),
        jitter_probability: float = 0.8,
        grey_probability: float = 0.2,
        blur_sigma: Sequence[float] = (0.1, 2.0),
        blur_probability: float = 0.5,
    ) -> None:
        """
        Args:
            crop: draws the part and the flip of a view. If it is for inference, there is one view.
            jitter: largest change of brightness, contrast, saturation (factors) and hue (circle).
            jitter_probability: of a change of colours.
            grey_probability: of a loss of colours.
            blur_sigma: smallest and largest standard deviation, in pixels.
            blur_probability: of a blur.

        Raises:
            UserError: a value is invalid.
        """
        is_jitter = len(jitter) == 4 and min(jitter) >= 0 and max(*jitter[:3], 2 * jitter[3]) <= 1
        is_sigma = len(blur_sigma) == 2 and 0 < blur_sigma[0] <= blur_sigma[1]
        check_input_keys(
            ("TWO_VIEWS.JITTER", jitter, is_jitter, "three values in [0, 1] and a hue in [0, 0.5]"),
            ("TWO_VIEWS.BLUR_SIGMA", blur_sigma, is_sigma, "[min, max] with 0 < min <= max"),
            *(
                (f"TWO_VIEWS.{name}_PROBABILITY", value, 0 <= value <= 1, "in [0, 1]")
                for name, value in (
                    ("JITTER", jitter_probability),
                    ("GREY", grey_probability),
                    ("BLUR", blur_probability),
                )
            ),
        )
        self._crop = crop
        self._sigma = blur_sigma[0], blur_sigma[1]
        brightness, contrast, saturation, hue = jitter
        self._augment_rgb = v2.Compose(
            [
                v2.RandomApply(
                    [v2.ColorJitter(brightness, contrast, saturation, hue)], p=jitter_probability
                ),
                v2.RandomGrayscale(p=grey_probability),
                v2.RandomApply([self._blur], p=blur_probability),
            ]
        )

    @classmethod
    def from_config(cls, cfg: CfgNode, is_train: bool = True) -> dict[str, Any]:
        keys = cfg.INPUT.TWO_VIEWS
        return {
            "crop": PretrainingMapper(cfg, is_train),
            "jitter": keys.JITTER,
            "jitter_probability": keys.JITTER_PROBABILITY,
            "grey_probability": keys.GREY_PROBABILITY,
            "blur_sigma": keys.BLUR_SIGMA,
            "blur_probability": keys.BLUR_PROBABILITY,
        }

    def prepare(self, dataset_dicts: Sequence[dict[str, Any]]) -> None:
        self._crop.prepare(dataset_dicts)

    def __call__(self, dataset_dict: dict[str, Any]) -> dict[str, Any] | DataError:
        entry = self._crop(dataset_dict)
        if isinstance(entry, DataError) or not self._crop.is_train:
            return entry
        other = self._crop(dataset_dict)
        if isinstance(other, DataError):
            return other
        views = {"image": entry["image"], "image_key": other["image"]}
        return {**entry, **{key: self._augment(view) for key, view in views.items()}}

    def _augment(self, image: Tensor) -> Tensor:
        """Draws other colours and a blur for a view (3, S, S), uint8."""
        if self._crop.pixel_format == "RGB":
            augmented: Tensor = self._augment_rgb(image)
            return augmented.contiguous()
        return self._augment_rgb(image.flip(0)).flip(0).contiguous()

    def _blur(self, image: Tensor) -> Tensor:
        sigma = float(torch.empty(()).uniform_(*self._sigma))
        # The time of a blur grows with the square of the radius, which the image's side limits.
        radius = min(math.ceil(_REACH * sigma), image.shape[-1] - 1)
        return F.gaussian_blur(image, [2 * radius + 1] * 2, [sigma] * 2)
