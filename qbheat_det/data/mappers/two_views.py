# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The mapper of contrastive pre-training: two augmentations of one image that share nothing else.

MoCo-v2's, arXiv:2003.04297: a random part and a flip, colour jitter, grey, blur. What differs: the
colours are torchvision's on bytes, and the blur's kernel ends at three standard deviations.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from detectron2.config import CfgNode, configurable
from torch import Tensor
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from qbheat_det.core.errors import UserError
from qbheat_det.data.errors import DataError

from .pretraining import PretrainingMapper

_REACH = 3.0  # standard deviations that a blur looks to each side


class TwoViewMapper:
    """From a record with ``file_name`` to two views of the image.

    Returns what ``PretrainingMapper`` returns, and in training beside ``image`` a second view,
    ``image_key`` (3, S, S), uint8, drawn independently. In inference there is the one square in
    the middle, and nothing is done to its colours. All that is drawn is drawn from torch's global
    generator. An image that cannot be read is a ``DataError``.

    An image that is not in memory is read from its file once for each view, each time only as
    much of it as the view needs.
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
            crop: draws the part and the flip of a view; whether it is that of training decides
                whether there are two views, and anything is drawn.
            jitter: how far brightness, contrast, saturation (factors) and hue (circle) may go.
            jitter_probability: that a view's colours are changed.
            grey_probability: that a view loses its colours.
            blur_sigma: smallest and largest standard deviation, in pixels.
            blur_probability: that a view is blurred.

        Raises:
            UserError: a value makes no sense.
        """
        is_jitter = len(jitter) == 4 and min(jitter) >= 0 and max(*jitter[:3], 2 * jitter[3]) <= 1
        is_sigma = len(blur_sigma) == 2 and 0 < blur_sigma[0] <= blur_sigma[1]
        probabilities = {
            "JITTER_PROBABILITY": jitter_probability,
            "GREY_PROBABILITY": grey_probability,
            "BLUR_PROBABILITY": blur_probability,
        }
        for key, value, is_valid, must in (
            ("JITTER", jitter, is_jitter, "three values in [0, 1] and a hue in [0, 0.5]"),
            ("BLUR_SIGMA", blur_sigma, is_sigma, "[min, max] with 0 < min <= max"),
            *((k, p, 0 <= p <= 1, "a probability") for k, p in probabilities.items()),
        ):
            if not is_valid:
                raise UserError(f"INPUT.TWO_VIEWS.{key} must be {must}, but is {value}")
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
        """See ``PretrainingMapper.prepare``."""
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
        if self._crop.pixel_format == "BGR":
            return self._augment_rgb(image.flip(0)).flip(0).contiguous()
        augmented: Tensor = self._augment_rgb(image)
        return augmented.contiguous()

    def _blur(self, image: Tensor) -> Tensor:
        sigma = float(torch.empty(()).uniform_(*self._sigma))
        # The time of a blur grows with the square of this; no farther than a mirror image reaches.
        radius = min(math.ceil(_REACH * sigma), image.shape[-1] - 1)
        blurred: Tensor = F.gaussian_blur(image, [2 * radius + 1] * 2, [sigma] * 2)
        return blurred
