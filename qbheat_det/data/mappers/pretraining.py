# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The mapper of pre-training: a random part of an image, resized to a square, sometimes flipped.

"Going deeper with convolutions", arXiv:1409.4842, as torchvision's ``RandomResizedCrop`` draws it.
An image that cannot be read is skipped and reported, not fatal.
"""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from detectron2.config import CfgNode, configurable
from torchvision.transforms import RandomResizedCrop

from qbheat_det.core.errors import UserError
from qbheat_det.data.errors import DataError
from qbheat_det.data.images import Box, open_image, resize
from qbheat_det.data.memory import DecodedImages, decode_if_small

_FLIPS: dict[str, tuple[int, ...]] = {"none": (), "horizontal": (2,), "vertical": (1,)}
_FORMATS = ("RGB", "BGR")
_KEPT = ("file_name", "image_id", "label", "place")


class PretrainingMapper:
    """From a record with ``file_name`` to an image of the size that the model sees.

    Returns the record's ``file_name``, ``image_id``, ``label`` and ``place`` (of the quarter that
    is to be visible), as far as it has them, and ``image`` (3, S, S), uint8, in the channel order
    of ``INPUT.FORMAT``. In training, the part, the flip and nothing else are drawn, from torch's
    global generator; in inference the part is the largest square in the middle, or a share of it.
    An image that cannot be read is a ``DataError``.
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
            flip: "none", or "horizontal" or "vertical" for one in two images.
            pixel_format: "RGB" or "BGR".
            memory_gb: images that take less than this when decoded stay in memory, in GB.
            test_crop: in inference, side of the square relative to the image's shorter side.
            is_train: whether parts are random.

        Raises:
            UserError: a value makes no sense.
        """
        is_scale = len(scale) == 2 and 0 < scale[0] <= scale[1] <= 1
        is_ratio = len(ratio) == 2 and 0 < ratio[0] <= ratio[1]
        for key, value, is_valid, must in (
            ("PRETRAIN.SCALE", scale, is_scale, "[min, max] with 0 < min <= max <= 1"),
            ("PRETRAIN.RATIO", ratio, is_ratio, "[min, max] with 0 < min <= max"),
            ("PRETRAIN.SIZE", size, size >= 1, "at least 1 pixel"),
            ("PRETRAIN.MEMORY_GB", memory_gb, memory_gb >= 0, "0 or more"),
            ("CLASSIFY.TEST_CROP", test_crop, 0 < test_crop <= 1, "above 0 and at most 1"),
            ("RANDOM_FLIP", flip, flip in _FLIPS, f"one of {', '.join(_FLIPS)}"),
            ("FORMAT", pixel_format, pixel_format in _FORMATS, f"one of {', '.join(_FORMATS)}"),
        ):
            if not is_valid:
                raise UserError(f"INPUT.{key} must be {must}, but is {value!r}")
        self.size = size
        self.scale = scale[0], scale[1]
        self.ratio = ratio[0], ratio[1]
        self.test_crop = test_crop
        self.is_train = is_train
        self.pixel_format = pixel_format
        self._flipped = _FLIPS[flip]
        self._reversed = (0,) if pixel_format == "BGR" else ()
        self._memory_gb = memory_gb
        self._memory: DecodedImages | None = None

    @classmethod
    def from_config(cls, cfg: CfgNode, is_train: bool = True) -> dict[str, Any]:
        keys = cfg.INPUT.PRETRAIN
        # Images in memory may be scaled down, where there is room for them: a view that is drawn
        # once is to be the same on every machine, in any number of processes.
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
        """Decodes all images if they are to stay in memory; called once, before workers start."""
        # The smallest part that can be drawn still has as many pixels as the model sees.
        smallest = math.sqrt(self.scale[0] * min(self.ratio[0], 1 / self.ratio[1]))
        self._memory = decode_if_small(
            [record["file_name"] for record in dataset_dicts],
            shorter_side=math.ceil(self.size / smallest),
            budget=self._memory_gb * 1e9,
        )

    def __call__(self, dataset_dict: dict[str, Any]) -> dict[str, Any] | DataError:
        file_name = dataset_dict["file_name"]
        try:
            kept_image = self._memory.get(file_name) if self._memory is not None else None
            with nullcontext(kept_image) if kept_image else open_image(file_name) as picture:
                box = self._choose_box(picture.width, picture.height)
                pixels = picture.read(box, self.size)
        except MemoryError:
            raise
        except Exception as error:  # what a broken file raises depends on its format's decoder
            reason = " ".join(f"{type(error).__name__}: {error}".split())
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
