# Copyright (c) qbheat_det contributors. Apache-2.0.
"""QB-Heat: pre-training by linear prediction of three quarters of an image from the fourth.

Paper: "Self-Supervised Learning based on Heat Equation" (QB-Heat), Chen et al.,
arXiv:2211.13228, Sec. 3, 4 and Appendix A. What it leaves open is said in the parts, in
``modeling/pretrain``. Of Mobile-Former, the output that is predicted is "s16_expanded", which the
paper counts as part of the backbone and its classifiers and decoders read: pre-trained from any
earlier map, the last convolution would stay random under a frozen backbone.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from detectron2.config import CfgNode, configurable
from detectron2.layers import ShapeSpec
from detectron2.modeling import META_ARCH_REGISTRY, Backbone, build_backbone
from torch import Tensor, nn

from qbheat_det.errors import UserError
from qbheat_det.modeling.pretrain import (
    PLACES,
    PLACES_OF,
    HeatPredictor,
    ReconstructionDecoder,
    ReconstructionLoss,
    VisibleQuarters,
    patchify,
    unpatchify,
    visible_positions,
)

logger = logging.getLogger(__name__)


@META_ARCH_REGISTRY.register()
class QBHeat(nn.Module):
    """An encoder of a quarter of the image, linear predictions of the rest, a decoder to pixels.

    Any Detectron2 backbone serves as encoder; it sees the visible quarter alone, at a quarter of
    the cost. Its map has G x G positions over the image, one for each patch of its stride; G is a
    multiple of 4.

    The matrices of the paper are ``predictor.scales["corner"].matrices()["A1"]`` and so on.
    """

    left_behind = ("projection", "predictor", "decoder")
    """The children that nothing but this pre-training needs."""

    @configurable
    def __init__(
        self,
        *,
        backbone: Backbone,
        predictor: HeatPredictor,
        decoder: ReconstructionDecoder,
        loss: ReconstructionLoss,
        in_feature: str,
        pixel_mean: Sequence[float],
        pixel_std: Sequence[float],
    ) -> None:
        """
        Args:
            backbone: what is to be trained; gives ``in_feature``.
            predictor: from the features of the visible quarter to those of the image.
            decoder: from features to pixels; its grid and its patches say how large images are.
            loss: compares patches.
            in_feature: name of the backbone's map.
            pixel_mean: mean of each channel, in the mapper's pixel format.
            pixel_std: standard deviation of each channel.

        Raises:
            ValueError: the backbone has no such map, or its positions are not the decoder's
                patches, or the image does not fall into quarters of quarters.
        """
        super().__init__()
        self.image_size = decoder.image_size
        shape = find_map(backbone.output_shape(), in_feature, self.image_size)
        if shape.stride != decoder.patch_size:
            raise ValueError(
                f"'{in_feature}' has stride {shape.stride}, but the decoder's patches have "
                f"{decoder.patch_size} pixels a side: both must be the same"
            )
        for name, other in backbone.output_shape().items():
            if (other.stride or 0) > shape.stride:
                logger.warning(
                    f"'{name}' lies behind '{in_feature}', which is what is learned from: its own "
                    "layers stay as they began"
                )
        self.backbone = backbone
        self.projection = nn.Conv2d(shape.channels, predictor.dim, 1)
        nn.init.xavier_uniform_(self.projection.weight)
        nn.init.zeros_(self.projection.bias)  # type: ignore[arg-type]
        self.predictor = predictor
        self.decoder = decoder
        self.loss = loss
        self.in_features = [in_feature]  # where other models name what they read of a backbone
        visible = visible_positions(decoder.grid_size).flatten(1)
        self.register_buffer("visible", visible, persistent=False)
        self.visible: Tensor  # (5, G * G), by place
        self.register_buffer("pixel_mean", torch.tensor(pixel_mean).view(-1, 1, 1), False)
        self.register_buffer("pixel_std", torch.tensor(pixel_std).view(-1, 1, 1), False)
        self.pixel_mean: Tensor
        self.pixel_std: Tensor

    @classmethod
    def from_config(cls, cfg: CfgNode) -> dict[str, Any]:
        node, size = cfg.MODEL.QB_HEAT, cfg.INPUT.PRETRAIN.SIZE
        backbone = build_backbone(cfg)
        stride = find_map(backbone.output_shape(), node.IN_FEATURE, size).stride
        return {
            "backbone": backbone,
            "predictor": HeatPredictor(
                dim=node.FEATURE_DIM, num_models=node.NUM_MODELS, visible=node.VISIBLE
            ),
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

    @property
    def device(self) -> torch.device:
        """Where the model lives."""
        return self.pixel_mean.device

    def forward(
        self, batched_inputs: list[dict[str, Any]], places: Sequence[str] | None = None
    ) -> Any:
        """
        Args:
            batched_inputs: dicts of a dataset mapper: "image" (3, S, S) and, where a test set
                says so, "place".
            places: of the visible quarters, one name of ``PLACES`` an image. By default they are
                drawn in training; else they are the images' own, and where those have none, the
                images of a batch take them in turn.

        Returns:
            A dict of losses in training; else a list with a dict for each image: "reconstruction"
            (3, S, S) in the mapper's pixels, where nothing is copied from the image but, with
            normalised patches, the mean and the deviation of each; "visible" (S, S), True where
            the encoder looked; "place"; "loss_reconstruction", 0-d.
        """
        images = self.preprocess_image(batched_inputs)
        if places is None and not self.training:
            own = [entry["place"] for entry in batched_inputs if "place" in entry]
            places = own if len(own) == len(images) else None
        quarters = self.choose_quarters(len(images), places)
        images = images[quarters.order]
        z = self.encode(quarters.crop(images))
        z = self.predictor(z, quarters.counts)
        predicted = self.decoder(z)
        patches = patchify(images, self.decoder.patch_size)
        losses = self.loss(predicted, patches, quarters.spread(self.visible))
        if self.training:
            return {"loss_reconstruction": losses.mean()}
        return self.inference(self.loss.restore(predicted, patches), losses, quarters)

    def preprocess_image(self, batched_inputs: list[dict[str, Any]]) -> Tensor:
        """Returns (N, 3, S, S), normalised.

        Raises:
            UserError: an image has another size.
        """
        expected = (len(self.pixel_mean), self.image_size, self.image_size)
        for entry in batched_inputs:
            if entry["image"].shape != expected:
                raise UserError(
                    f"image '{entry.get('file_name', '')}' has shape {tuple(entry['image'].shape)},"
                    f" but pre-training wants {expected}: INPUT.DATASET_MAPPER_NAME 'pretrain' "
                    "crops images to INPUT.PRETRAIN.SIZE"
                )
        # Stacked first, so that a batch goes to the device at once, a byte a value.
        images = torch.stack([entry["image"] for entry in batched_inputs])
        images = images.to(self.device, non_blocking=True)
        return (images - self.pixel_mean) / self.pixel_std

    def choose_quarters(self, num_images: int, places: Sequence[str] | None) -> VisibleQuarters:
        """Returns where each image is visible, see ``places`` in ``forward``.

        Raises:
            ValueError: a place is unknown, or the predictor is not made for it.
        """
        known = PLACES_OF[self.predictor.visible]
        if places is None:
            if self.training:
                return VisibleQuarters.draw(
                    num_images, visible=self.predictor.visible, device=self.device
                )
            places = [known[i % len(known)] for i in range(num_images)]
        if len(places) != num_images or set(places) - set(known):
            raise ValueError(
                f"each of the {num_images} images needs a place of {known}, not {list(places)}"
            )
        return VisibleQuarters.at(places, device=self.device)

    def encode(self, visible: Tensor) -> Tensor:
        """From visible quarters (N, 3, S / 2, S / 2) to features z, (N, G / 2, G / 2, C)."""
        z = self.projection(self.backbone(visible)[self.in_features[0]])
        half = self.decoder.grid_size // 2
        if z.shape[-2:] != (half, half):
            raise ValueError(
                f"'{self.in_features[0]}' has {tuple(z.shape[-2:])} positions for {half} x {half} "
                "patches: the backbone pads or crops, and cannot be pre-trained by quarters"
            )
        return z.permute(0, 2, 3, 1).contiguous()

    def inference(
        self, patches: Tensor, losses: Tensor, quarters: VisibleQuarters
    ) -> list[dict[str, Any]]:
        """Brings reconstructed patches (N, G * G, P), ordered, to pixels in the batch's order."""
        size = self.decoder.patch_size
        pixels = unpatchify(patches, size) * self.pixel_std + self.pixel_mean
        grid = (self.decoder.grid_size, self.decoder.grid_size)
        visible = self.visible.unflatten(1, grid)
        visible = visible.repeat_interleave(size, dim=1).repeat_interleave(size, dim=2)
        names = [
            name for name, count in zip(PLACES, quarters.counts, strict=True) for _ in range(count)
        ]
        results: list[dict[str, Any]] = [{} for _ in names]
        for row, index in enumerate(quarters.order.tolist()):
            results[index] = {
                "reconstruction": pixels[row],
                "visible": visible[PLACES.index(names[row])],
                "place": names[row],
                "loss_reconstruction": losses[row],
            }
        return results


def find_map(shapes: Mapping[str, ShapeSpec], name: str, image_size: int) -> ShapeSpec:
    """Returns the shape of a backbone's map that falls into quarters of quarters.

    Raises:
        ValueError: it does not, or there is none of that name; the sentence says what would work.
    """
    strides = {key: shape.stride for key, shape in shapes.items() if shape.stride}
    fitting = [key for key, stride in strides.items() if image_size % (4 * stride) == 0]
    if name not in strides:
        raise ValueError(
            f"MODEL.QB_HEAT.IN_FEATURE '{name}' is no map of the backbone, whose maps have the "
            f"strides {strides}; for images of {image_size} pixels, use one of {fitting}, or ask "
            "the backbone for more maps (MODEL.TIMM.OUT_FEATURES, MODEL.MOBILE_FORMER.OUT_FEATURES)"
        )
    if name not in fitting or image_size < 1:
        multiple = 4 * strides[name]
        nearest = max(1, round(image_size / multiple)) * multiple
        others = f", or MODEL.QB_HEAT.IN_FEATURE to one of {fitting}" if fitting else ""
        raise ValueError(
            f"'{name}' has stride {strides[name]}, so the image's side must be a multiple of "
            f"{multiple}, not {image_size}: set INPUT.PRETRAIN.SIZE to {nearest}{others}"
        )
    return shapes[name]
