# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What objectives that reconstruct masked pixels share: QB-Heat and random masking.

They differ in which part of the image the encoder gets and in how the features of the rest are
predicted; all read ``MODEL.QB_HEAT``. QB-Heat, arXiv:2211.13228, Sec. 4; normalised patches, and
that masked positions count, are MAE's, arXiv:2111.06377.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from detectron2.config import CfgNode
from detectron2.modeling import Backbone, build_backbone
from torch import Tensor, nn
from torch.nn import functional as F

from .base import PretrainingModel, find_map
from .pixel_decoder import ReconstructionDecoder, masked_positions, patchify, unpatchify

LOSS_POSITIONS = ("masked", "all")
_EPSILON = 1e-6  # added to the variance of a patch, as in MAE


class ReconstructionLoss(nn.Module):
    """Mean squared error over the pixels of patches, P = 3 * patch_size ** 2 in each."""

    def __init__(self, *, positions: str = "masked", normalize_patches: bool = True) -> None:
        """Takes what counts, "masked" or "all", and whether targets are normalised patches."""
        super().__init__()
        if positions not in LOSS_POSITIONS:
            raise ValueError(f"LOSS_ON is one of {LOSS_POSITIONS}, not '{positions}'")
        self.positions = positions
        self.normalize_patches = normalize_patches

    def forward(self, predicted: Tensor, patches: Tensor, visible: Tensor) -> Tensor:
        """From predicted and true patches (N, L, P) to the loss of each image, (N,).

        ``visible`` (N, L) is True where the encoder got the patch, equally often in each image.
        """
        error = (predicted.float() - self.find_target(patches)).square().mean(dim=-1)
        if self.positions == "all":
            return error.mean(dim=1)
        masked = ~visible
        return (error * masked).sum(dim=1) / masked.sum(dim=1)

    def over_batch(self, predicted: Tensor, patches: Tensor) -> Tensor:
        """Returns the mean error, (), of predictions and true patches (N, K, P) that all count."""
        return F.mse_loss(predicted.float(), self.find_target(patches))

    def find_target(self, patches: Tensor) -> Tensor:
        """From true patches (N, L, P) to the target of the predictions, of the same shape."""
        if not self.normalize_patches:
            return patches
        # The same with the unbiased variance, in one pass; ``var_mean`` is slow on CPUs.
        share = 1 - 1 / patches.shape[-1]
        return F.layer_norm(patches, patches.shape[-1:], eps=_EPSILON * share) * share**0.5

    def restore(self, predicted: Tensor, patches: Tensor) -> Tensor:
        """Brings predictions (N, L, P) to pixel values, with the true patches' statistics."""
        if not self.normalize_patches:
            return predicted.float()
        mean, deviation = _statistics(patches)
        return predicted.float() * deviation + mean


def _statistics(patches: Tensor) -> tuple[Tensor, Tensor]:
    """Returns mean and standard deviation of each patch, (N, L, 1)."""
    variance, mean = torch.var_mean(patches, dim=-1, keepdim=True)
    return mean, (variance + _EPSILON).sqrt()


class FeaturePredictor(Protocol):
    """A module from the features of what the encoder got to those of all positions."""

    dim: int
    """C of the features."""

    def __call__(self, z: Tensor, *args: Any) -> Tensor:
        """From features, and what else the objective passes, to (N, G, G, C)."""


class ReconstructionModel(PretrainingModel):
    """An encoder of what is visible, predicted features of the rest, a decoder to pixels.

    The map has G x G positions over the image, one for each patch of its stride.
    """

    pretrain_only_modules = ("projection", "predictor", "decoder")
    grid_multiple = 1
    """G is a multiple of it."""

    @property
    def views(self) -> Mapping[str, Sequence[str]]:
        """See ``ReconstructionObjective`` in ``modeling/contracts.py``."""
        return {"patches": ()}

    def __init__(
        self,
        *,
        backbone: Backbone,
        predictor: FeaturePredictor,
        decoder: ReconstructionDecoder,
        loss: ReconstructionLoss,
        in_feature: str,
        **statistics: Any,
    ) -> None:
        """
        Args:
            backbone: has the output ``in_feature``.
            predictor: from the features of what is visible to those of the image.
            decoder: from features to pixels; its grid and patch size give the image size.
            loss: compares patches.
            in_feature: name of the backbone's map.
            statistics: ``pixel_mean`` and ``pixel_std``, see ``ImageModel``.

        Raises:
            ValueError: the backbone has no such map, or its stride is not the decoder's patch size,
                or the map cannot be divided by ``grid_multiple``.
        """
        size, multiple = decoder.image_size, self.grid_multiple
        shape = find_map(backbone.output_shape(), in_feature, size, multiple=multiple)
        if shape.stride != decoder.patch_size:
            raise ValueError(
                f"'{in_feature}' has stride {shape.stride}, but the decoder's patches have "
                f"{decoder.patch_size} pixels a side: both must be the same"
            )
        super().__init__(
            backbone=backbone,
            in_feature=in_feature,
            head_in_features=[in_feature],
            image_size=size,
            **statistics,
        )
        self.projection = nn.Conv2d(shape.channels, predictor.dim, 1)
        nn.init.xavier_uniform_(self.projection.weight)
        nn.init.zeros_(self.projection.bias)  # type: ignore[arg-type]
        self.predictor = predictor
        self.decoder = decoder
        self.loss = loss

    @classmethod
    def shared_from_config(cls, cfg: CfgNode) -> dict[str, Any]:
        """Returns all arguments of the constructor but ``predictor``."""
        node, size = cfg.MODEL.QB_HEAT, cfg.INPUT.PRETRAIN.SIZE
        if node.FEATURE_DIM < 1:
            raise ValueError(f"MODEL.QB_HEAT.FEATURE_DIM is at least 1, not {node.FEATURE_DIM}")
        backbone = build_backbone(cfg)
        shapes, multiple = backbone.output_shape(), cls.grid_multiple
        stride = find_map(shapes, node.IN_FEATURE, size, multiple=multiple).stride
        return {
            "backbone": backbone,
            "decoder": ReconstructionDecoder(
                in_channels=node.FEATURE_DIM,
                grid_size=size // stride,
                patch_size=stride,
                dim=node.DECODER_DIM,
                depth=node.DECODER_DEPTH,
                num_heads=node.DECODER_HEADS,
                mlp_ratio=node.DECODER_MLP_RATIO,
            ),
            "loss": ReconstructionLoss(
                positions=node.LOSS_ON, normalize_patches=node.NORM_PIXEL_LOSS
            ),
            "in_feature": node.IN_FEATURE,
            "pixel_mean": cfg.MODEL.PIXEL_MEAN,
            "pixel_std": cfg.MODEL.PIXEL_STD,
        }

    def encode(self, visible: Tensor) -> Tensor:
        """From images (N, 3, H, W), or the visible parts of them, to features (N, h, w, C)."""
        z: Tensor = self.projection(self.backbone(visible)[self.in_feature])
        return z.permute(0, 2, 3, 1).contiguous()

    def training_losses(
        self, z: Tensor, images: Tensor, visible: Tensor, num_masked: int
    ) -> dict[str, Tensor]:
        """Returns the mean loss, decoding only positions that count.

        From features (N, G, G, C), normalised images (N, 3, S, S), and where the encoder got the
        patch, (N, G * G), all but ``num_masked`` in each image.
        """
        masked = None
        if self.loss.positions == "masked":
            masked = masked_positions(visible, num_masked)
        predicted = self.decoder(z, masked)
        patches = patchify(images, self.decoder.patch_size, masked)
        return {"loss_reconstruction": self.loss.over_batch(predicted, patches)}

    def inference(self, z: Tensor, images: Tensor, visible: Tensor) -> list[dict[str, Any]]:
        """Returns of each image "reconstruction" (3, S, S), "visible" (S, S) and its loss.

        Arguments are those of ``training_losses``. Reconstructions are in the mapper's pixels;
        normalised patches get mean and deviation of the image's.
        """
        size, grid = self.decoder.patch_size, self.decoder.grid_size
        predicted, patches = self.decoder(z), patchify(images, size)
        losses = self.loss(predicted, patches, visible)
        pixels = unpatchify(self.loss.restore(predicted, patches), size)
        pixels = pixels * self.pixel_std + self.pixel_mean
        visible = visible.unflatten(1, (grid, grid))
        visible = visible.repeat_interleave(size, dim=1).repeat_interleave(size, dim=2)
        return [
            {"reconstruction": image, "visible": mask, "loss_reconstruction": loss}
            for image, mask, loss in zip(pixels, visible, losses, strict=True)
        ]
