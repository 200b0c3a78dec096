# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Scattered masking: pre-training by reconstruction of hidden patches that lie all over the image.

Two objectives that differ in one part alone, how features come to hidden positions: interpolated
from visible ones, the question that a reader of QB-Heat (arXiv:2211.13228) asked, or one learned
[MASK] token as in MAE (arXiv:2111.06377). See ``modeling/pretrain/hidden_features.py``.

What deviates from MAE: the encoder is a convolutional one, so it takes the whole image with zeros
in the holes, at the cost of the whole image (four times QB-Heat's encoder), and a visible position
sees visible neighbours through its receptive field. What it puts at hidden positions is thrown
away. Decoder and target are QB-Heat's, and so are their config keys, ``MODEL.QB_HEAT``.
"""

from collections.abc import Sequence
from typing import Any

import torch
from detectron2.config import CfgNode, configurable
from detectron2.modeling import META_ARCH_REGISTRY, Backbone
from torch import Tensor

from qbheat_det.modeling.pretrain import (
    InterpolatedFeatures,
    MaskToken,
    RandomMask,
    ReconstructionDecoder,
    ReconstructionLoss,
    ReconstructionModel,
)


class RandomMasking(ReconstructionModel):
    """An encoder of an image with holes, filled in features of these, a decoder to pixels.

    The patches of K of the G x G positions of the backbone's map are visible, as many in each
    image, at random.
    """

    predictor: InterpolatedFeatures | MaskToken

    @configurable
    def __init__(
        self,
        *,
        backbone: Backbone,
        predictor: InterpolatedFeatures | MaskToken,
        decoder: ReconstructionDecoder,
        loss: ReconstructionLoss,
        in_feature: str,
        pixel_mean: Sequence[float],
        pixel_std: Sequence[float],
        mask_ratio: float = 0.75,
    ) -> None:
        """
        Args:
            predictor: from features (N, G, G, C) and what is visible (N, G, G) to features.
            mask_ratio: share of the positions that are hidden.

        All others, and what is raised, are those of ``ReconstructionModel``.

        Raises:
            ValueError: the ratio leaves nothing visible, or hides nothing.
        """
        super().__init__(
            backbone=backbone,
            predictor=predictor,
            decoder=decoder,
            loss=loss,
            in_feature=in_feature,
            pixel_mean=pixel_mean,
            pixel_std=pixel_std,
        )
        self.mask = RandomMask(grid_size=decoder.grid_size, mask_ratio=mask_ratio)

    @classmethod
    def build_predictor(cls, dim: int) -> InterpolatedFeatures | MaskToken:
        """Returns what fills in hidden features of ``dim`` channels."""
        raise NotImplementedError

    @classmethod
    def from_config(cls, cfg: CfgNode) -> dict[str, Any]:
        return {
            **cls.shared_from_config(cfg),
            "predictor": cls.build_predictor(cfg.MODEL.QB_HEAT.FEATURE_DIM),
            "mask_ratio": cfg.MODEL.RANDOM_MASKING.MASK_RATIO,
        }

    def forward(self, batched_inputs: list[dict[str, Any]], visible: Tensor | None = None) -> Any:
        """
        Args:
            batched_inputs: dicts of a dataset mapper: "image" (3, S, S) and, for what is hidden of
                it in evaluation, "image_id" or "file_name".
            visible: (N, G, G), True where the encoder may look. By default it is drawn in training,
                and follows from the image's name else.

        Returns:
            A dict of losses in training; else a list with a dict for each image, see
            ``ReconstructionModel.inference``.

        Raises:
            ValueError: ``visible`` has another shape or type, not as many in each image, or all or
                nothing of an image.
        """
        images = self.preprocess_image(batched_inputs)
        num_visible = self.mask.num_visible if visible is None else int(visible[0].sum())
        visible = self.choose_visible(batched_inputs, visible)
        z = self.predictor(self.encode(self.hide(images, visible)), visible)
        visible = visible.flatten(1)
        if self.training:
            return self.training_losses(z, images, visible, visible.shape[1] - num_visible)
        return self.inference(self.reconstruct(z, images, visible))

    def choose_visible(
        self, batched_inputs: list[dict[str, Any]], visible: Tensor | None
    ) -> Tensor:
        """Returns what of each image is visible, see ``forward``."""
        shape = (len(batched_inputs), self.mask.grid_size, self.mask.grid_size)
        if visible is not None:
            if visible.shape != shape or visible.dtype != torch.bool:
                raise ValueError(
                    f"visible positions come as a bool tensor of shape {shape}, not as "
                    f"{visible.dtype} of {tuple(visible.shape)}"
                )
            counts = set(visible.flatten(1).sum(dim=1).tolist())
            if len(counts) != 1 or counts & {0, self.mask.grid_size**2}:
                raise ValueError(
                    "as many positions are visible in each image, at least one and not all, but "
                    f"{sorted(counts)} of {self.mask.grid_size**2} are"
                )
            return visible.to(self.device)
        if self.training:
            return self.mask.draw(len(batched_inputs), device=self.device)
        names = [
            str(entry.get("image_id", entry.get("file_name", i)))
            for i, entry in enumerate(batched_inputs)
        ]
        return self.mask.of_images(names, device=self.device)

    def hide(self, images: Tensor, visible: Tensor) -> Tensor:
        """Returns normalised images (N, 3, S, S) with zeros where they are not visible."""
        size = self.decoder.patch_size
        pixels = visible.repeat_interleave(size, dim=1).repeat_interleave(size, dim=2)
        return torch.where(pixels.unsqueeze(1), images, 0.0)


@META_ARCH_REGISTRY.register()
class InterpolatedMasking(RandomMasking):
    """Scattered masking whose hidden features are interpolated from visible ones.

    The matrices of the axes are ``predictor.x`` and ``predictor.y``.
    """

    @classmethod
    def build_predictor(cls, dim: int) -> InterpolatedFeatures:
        """Returns ``InterpolatedFeatures``."""
        return InterpolatedFeatures(dim=dim)


@META_ARCH_REGISTRY.register()
class MaskTokenMasking(RandomMasking):
    """Scattered masking whose hidden features are one learned token, ``predictor.token``."""

    @classmethod
    def build_predictor(cls, dim: int) -> MaskToken:
        """Returns a ``MaskToken``."""
        return MaskToken(dim=dim)
