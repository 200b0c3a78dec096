# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What pre-training predicts from what, without a network: quarters, patches and the loss."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from detectron2.config import CfgNode
from detectron2.modeling import build_backbone
from torch import Tensor

from qbheat_det.core.errors import UserError
from qbheat_det.data import preserved_randomness
from qbheat_det.modeling.pretrain import (
    QUADRANTS,
    QUADRANTS_OF,
    ReconstructionLoss,
    VisibleQuarters,
    find_map,
    visible_positions,
)

_SEEN_SIZE = 16  # rows and columns to which the visible quarter is averaged
_AXES = {"none": (), "horizontal": (-1,), "vertical": (-2,)}
_MIRRORED = {"horizontal": ("right", "left"), "vertical": ("bottom", "top")}  # in names of places


@dataclass(frozen=True)
class ReconstructionTask:
    """The task of a config of QB-Heat. Images are (N, 3, S, S), patches (N, L, P).

    Attributes:
        image_size: S, in pixels.
        patch_size: side of a patch, in pixels.
        visible: where the visible quarter can be, a key of ``QUADRANTS_OF``.
        flip: "none", or "horizontal" or "vertical" where training flips images.
        loss: compares patches.
        pixel_mean, pixel_std: of each channel, in the mapper's pixel format.
    """

    image_size: int
    patch_size: int
    visible: str
    flip: str
    loss: ReconstructionLoss
    pixel_mean: Sequence[float]
    pixel_std: Sequence[float]

    @classmethod
    def from_config(cls, cfg: CfgNode) -> "ReconstructionTask":
        """
        Raises:
            UserError: the config is none of QB-Heat, or not sound.
        """
        if cfg.MODEL.META_ARCHITECTURE != "QBHeat":
            raise UserError(
                f"MODEL.META_ARCHITECTURE is '{cfg.MODEL.META_ARCHITECTURE}', which predicts "
                "nothing from a quarter of an image: name a config of QBHeat, such as one of "
                "configs/ImageNet-QBHeat"
            )
        node, size = cfg.MODEL.QB_HEAT, cfg.INPUT.PRETRAIN.SIZE
        for key, value, known in (
            ("MODEL.QB_HEAT.VISIBLE", node.VISIBLE, tuple(QUADRANTS_OF)),
            ("INPUT.RANDOM_FLIP", cfg.INPUT.RANDOM_FLIP, tuple(_AXES)),
        ):
            if value not in known:
                raise UserError(f"{key} is '{value}', but must be one of {', '.join(known)}")
        try:
            with preserved_randomness():  # of weights that no one will see
                shapes = build_backbone(cfg).output_shape()
            return cls(
                image_size=size,
                patch_size=find_map(shapes, node.IN_FEATURE, size, multiple=4).stride,
                visible=node.VISIBLE,
                flip=cfg.INPUT.RANDOM_FLIP,
                loss=ReconstructionLoss(
                    positions=node.LOSS_ON, normalize_patches=node.NORM_PIXEL_LOSS
                ),
                pixel_mean=cfg.MODEL.PIXEL_MEAN,
                pixel_std=cfg.MODEL.PIXEL_STD,
            )
        except ValueError as error:
            raise UserError(str(error)) from error

    @property
    def num_inputs(self) -> int:
        """Values of ``look``."""
        return 3 * self._seen_size**2

    @property
    def num_outputs(self) -> int:
        """P, values of a patch."""
        return 3 * self.patch_size**2

    @property
    def places(self) -> list[str]:
        """The places that ``align`` leaves."""
        partners = [self._align_place(place) for place in QUADRANTS_OF[self.visible]]
        return list(dict.fromkeys(partners))

    def preprocess(self, images: Sequence[Tensor]) -> Tensor:
        """From the mapper's images (3, S, S) to (N, 3, S, S), normalised as the model has them."""
        mean, std = (torch.tensor(v).view(-1, 1, 1) for v in (self.pixel_mean, self.pixel_std))
        return (torch.stack(list(images)) - mean) / std

    def look(self, images: Tensor, place: str) -> Tensor:
        """Returns the visible quarter of all images, averaged to 16 x 16 pixels: (N, 768)."""
        quarters = VisibleQuarters.at([place] * len(images), device=images.device)
        size = (self._seen_size, self._seen_size)
        return F.interpolate(quarters.crop(images), size, mode="area").flatten(1)

    def with_mirrored(self, images: Tensor) -> Tensor:
        """Returns images and, where training flips some, all of them flipped after these."""
        return torch.cat([images, self._mirror(images)]) if self.flip != "none" else images

    def align(self, images: Tensor, place: str) -> tuple[Tensor, str]:
        """Mirrors images that are seen from the right (or, flipped vertically, from below).

        What is learned from a set that holds the mirror image of every image is for the
        right-hand corners the mirror image of what it is for those on the left.
        """
        partner = self._align_place(place)
        return (images if partner == place else self._mirror(images)), partner

    def find_counted(self, place: str) -> Tensor:
        """Returns the indices of the patches that the loss counts."""
        grid = self.image_size // self.patch_size
        visible = visible_positions(grid)[QUADRANTS.index(place)].flatten()
        counted = torch.ones_like(visible) if self.loss.positions == "all" else ~visible
        return counted.nonzero().flatten()

    @property
    def _seen_size(self) -> int:
        return min(_SEEN_SIZE, self.image_size // 2)

    def _mirror(self, images: Tensor) -> Tensor:
        return images.flip(_AXES[self.flip])

    def _align_place(self, place: str) -> str:
        return place.replace(*_MIRRORED[self.flip]) if self.flip != "none" else place
