# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What objectives that reconstruct hidden pixels have in common, QB-Heat and scattered masking.

They differ in what of the image the encoder sees and in how features come to where it does not;
projection, decoder and target are the same, and so are the config keys of these: all of them read
``MODEL.QB_HEAT.FEATURE_DIM``, ``DECODER_*``, ``LOSS_ON``, ``NORM_PIXEL_LOSS`` and ``IN_FEATURE``.
Objectives that are compared have the same decoder by construction.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from detectron2.config import CfgNode
from detectron2.modeling import Backbone, build_backbone
from torch import Tensor, nn

from .decoder_block import hidden_positions
from .pretraining_model import PretrainingModel, find_map
from .reconstruction_decoder import ReconstructionDecoder, patchify, unpatchify
from .reconstruction_loss import ReconstructionLoss


class FeaturePredictor(Protocol):
    """A module from the features that the encoder gave to those of all positions."""

    dim: int
    """C of the features."""

    def __call__(self, z: Tensor, *args: Any) -> Tensor:
        """From features and what the objective knows of them to (N, G, G, C)."""


@dataclass(frozen=True)
class Reconstruction:
    """Patches of a batch, (N, G * G, P): what was made of the image, and what it is."""

    predicted: Tensor
    patches: Tensor
    visible: Tensor  # (N, G * G), True where the encoder saw the patch
    losses: Tensor  # (N,)


class ReconstructionModel(PretrainingModel):
    """An encoder of what is visible, predicted features of the rest, a decoder to pixels.

    The map that is learned from has G x G positions over the image, one for each patch of its
    stride.
    """

    pretrain_only_modules = ("projection", "predictor", "decoder")
    grid_multiple = 1
    """G is a multiple of it."""

    @property
    def views(self) -> Mapping[str, Sequence[str]]:
        """Ways to see an image, each with the places that ``forward`` takes for it, if any."""
        return {"patches": ()}

    def __init__(
        self,
        *,
        backbone: Backbone,
        predictor: FeaturePredictor,
        decoder: ReconstructionDecoder,
        loss: ReconstructionLoss,
        in_feature: str,
        pixel_mean: Sequence[float],
        pixel_std: Sequence[float],
    ) -> None:
        """
        Args:
            backbone: what is to be trained; gives ``in_feature``.
            predictor: from the features of what is visible to those of the image.
            decoder: from features to pixels; its grid and its patches say how large images are.
            loss: compares patches.
            in_feature: name of the backbone's map.
            pixel_mean: mean of each channel, in the mapper's pixel format.
            pixel_std: standard deviation of each channel.

        Raises:
            ValueError: the backbone has no such map, or its positions are not the decoder's
                patches, or the image does not fall into ``grid_multiple`` parts.
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
            pixel_mean=pixel_mean,
            pixel_std=pixel_std,
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
        """From images (N, 3, H, W), or the visible parts of them, to features (N, h, w, C).

        Raises:
            ValueError: the map has not one position for each patch.
        """
        z = self.projection(self.backbone(visible)[self.in_feature])
        rows, columns = (side // self.decoder.patch_size for side in visible.shape[-2:])
        if z.shape[-2:] != (rows, columns):
            raise ValueError(
                f"'{self.in_feature}' has {tuple(z.shape[-2:])} positions for {rows} x "
                f"{columns} patches: the backbone pads or crops, and cannot be pre-trained to "
                "reconstruct them"
            )
        return z.permute(0, 2, 3, 1).contiguous()

    def reconstruct(self, z: Tensor, images: Tensor, visible: Tensor) -> Reconstruction:
        """Decodes features, and compares what comes out with the images.

        Args:
            z: (N, G, G, C), of all positions.
            images: (N, 3, S, S), normalised.
            visible: (N, G * G), True where the encoder saw the patch, equally often in each image.
        """
        predicted = self.decoder(z)
        patches = patchify(images, self.decoder.patch_size)
        return Reconstruction(predicted, patches, visible, self.loss(predicted, patches, visible))

    def training_losses(
        self, z: Tensor, images: Tensor, visible: Tensor, num_hidden: int
    ) -> dict[str, Tensor]:
        """Returns the mean of what ``reconstruct`` gives, at the cost of what the loss looks at.

        Args:
            z: as in ``reconstruct``.
            images: as in ``reconstruct``.
            visible: as in ``reconstruct``.
            num_hidden: positions of each image that are not visible.
        """
        hidden = None
        if self.loss.positions == "masked":
            hidden = hidden_positions(visible, num_hidden)
        predicted = self.decoder(z, hidden)
        patches = patchify(images, self.decoder.patch_size, hidden)
        return {"loss_reconstruction": self.loss.over_batch(predicted, patches)}

    def inference(self, reconstruction: Reconstruction) -> list[dict[str, Any]]:
        """Brings patches to pixels.

        Returns:
            For each image "reconstruction" (3, S, S) in the mapper's pixels, where nothing is
            copied from the image but, with normalised patches, the mean and the deviation of each;
            "visible" (S, S), True where the encoder looked; "loss_reconstruction", 0-d.
        """
        size, grid = self.decoder.patch_size, self.decoder.grid_size
        patches = self.loss.restore(reconstruction.predicted, reconstruction.patches)
        pixels = unpatchify(patches, size) * self.pixel_std + self.pixel_mean
        visible = reconstruction.visible.unflatten(1, (grid, grid))
        visible = visible.repeat_interleave(size, dim=1).repeat_interleave(size, dim=2)
        return [
            {"reconstruction": made, "visible": seen, "loss_reconstruction": loss}
            for made, seen, loss in zip(pixels, visible, reconstruction.losses, strict=True)
        ]
