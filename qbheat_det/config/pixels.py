# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The pixels on which weights were trained: a model must normalize its images in the same way."""

import logging
from dataclasses import dataclass

import torch
from detectron2.config import CfgNode
from torch import Tensor

_NAME = "trained_pixels."
# A backbone sees only the tensors below its own path in a model.
_PATHS = ("backbone.", "backbone.bottom_up.")
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pixels:
    """The channel order of images, and the statistics by which they are normalized.

    Attributes:
        format: "BGR" or "RGB"; "" if unknown.
        mean: mean of each channel, in this order; empty if unknown.
        std: standard deviation of each channel, in this order; empty if unknown.
    """

    format: str = ""
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    @classmethod
    def from_config(cls, cfg: CfgNode) -> "Pixels":
        """Reads ``INPUT.FORMAT``, ``MODEL.PIXEL_MEAN`` and ``MODEL.PIXEL_STD``."""
        return cls(
            format=cfg.INPUT.FORMAT,
            mean=tuple(map(float, cfg.MODEL.PIXEL_MEAN)),
            std=tuple(map(float, cfg.MODEL.PIXEL_STD)),
        )

    @classmethod
    def pop_from(cls, state: dict[str, Tensor]) -> "Pixels":
        """Removes the entries of ``to_tensors`` from a state dict, and returns their pixels."""
        pixels = cls()
        for name in list(state):
            _, marker, pixel_format = name.rpartition(_NAME)
            if marker:
                mean, std = state.pop(name).tolist()
                pixels = cls(pixel_format, tuple(mean), tuple(std))
        return pixels

    def to_tensors(self) -> dict[str, Tensor]:
        """Returns entries for the state dict of a model; none if a value is unknown."""
        if not (self.format and self.mean and self.std):
            return {}
        statistics = torch.tensor([self.mean, self.std], dtype=torch.float64)
        return {f"{path}{_NAME}{self.format}": statistics for path in _PATHS}

    def equals(self, other: "Pixels") -> bool:
        """Whether no value that both know differs, apart from rounding."""
        if self.format and other.format and self.format != other.format:
            return False
        for own, others in ((self.mean, other.mean), (self.std, other.std)):
            if not own or not others:
                continue
            if len(own) != len(others):
                return False
            if not torch.allclose(torch.tensor(own), torch.tensor(others), rtol=1e-4):
                return False
        return True

    def __str__(self) -> str:
        mean = [round(value, 3) for value in self.mean] or "unknown"
        std = [round(value, 3) for value in self.std] or "unknown"
        return f"{self.format or 'unknown format'}, mean {mean}, std {std}"


def warn_of_other_pixels(trained: Pixels, own: Pixels) -> None:
    """Logs a warning if weights were ``trained`` on other pixels than a model's ``own``."""
    if not trained.equals(own):
        logger.warning(
            "The weights were trained with the pixels %s, but the model has %s: check INPUT.FORMAT,"
            " MODEL.PIXEL_MEAN and MODEL.PIXEL_STD",
            trained,
            own,
        )
