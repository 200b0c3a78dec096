# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What prediction asks of a model: boxes in images, and the settings of its config."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from .array_instances import ArrayInstances
from .images import Image

if TYPE_CHECKING:  # an exported file runs without Detectron2
    from detectron2.config import CfgNode
    from detectron2.structures import Instances


class Predictor(Protocol):
    """The interface of detectors in PyTorch, exported detectors, and tiled prediction."""

    def predict_batch(
        self, images: Sequence[Image]
    ) -> "Sequence[Instances] | Sequence[ArrayInstances]":
        """Predicts on RGB images (H, W, 3) of any sizes.

        Returns the boxes of each image in pixels of this image: Detectron2's ``Instances`` on the
        CPU, or ``ArrayInstances`` from an exported detector.
        """


@dataclass(frozen=True)
class DetectorSettings:
    """What prediction needs of a detector's config.

    Attributes:
        class_names: names of the classes, by index; empty if unknown.
        category_ids: ids in the training annotations, by index; empty if unknown.
        tile: side of overlapping tiles in pixels (``INPUT.TILE``); 0 for whole images only.
        max_size: length in pixels of the longer side after the resize (``INPUT.MAX_SIZE_TEST``).
    """

    class_names: list[str]
    category_ids: list[int]
    tile: int
    max_size: int

    @classmethod
    def from_config(cls, cfg: "CfgNode") -> "DetectorSettings":
        """Reads the settings from a config."""
        return cls(
            class_names=list(cfg.MODEL.CLASS_NAMES),
            category_ids=list(cfg.MODEL.CATEGORY_IDS),
            tile=cfg.INPUT.TILE,
            max_size=cfg.INPUT.MAX_SIZE_TEST,
        )
