# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Pre-training by predicting a frozen teacher's features from a quarter or the whole image.

As in QB-Heat (arXiv:2211.13228), the encoder sees a quarter of the image, and linear models predict
the features of the rest. The target is not pixels, but the feature map of a trained network, the
teacher. If the whole image is visible, this is feature distillation. Target and loss follow
arXiv:2205.14141: each target vector is normalized to mean 0 and variance 1, and the loss is smooth
L1 with β = 2.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.modeling import META_ARCH_REGISTRY, Backbone, build_backbone
from torch import Tensor, nn
from torch.nn import functional as F

from qbheat_det.config import configurable
from qbheat_det.core.errors import UserError
from qbheat_det.modeling.checks import check_value
from qbheat_det.modeling.distillation_teacher import find_teacher_shape

from .base import PretrainingModel, find_feature_map
from .qb_heat import OFFSETS, HeatPredictor, QBHeat, VisibleQuarters

_BETA = 2.0  # of the smooth L1 loss


@META_ARCH_REGISTRY.register()
class FeatureDistillation(PretrainingModel):
    """Encodes a part of an image, and predicts the teacher's features of the whole image.

    The feature maps of encoder and teacher must have the same height and width, G x G positions.
    ``MODEL.QB_HEAT`` configures the visible part, the projection, and the linear models that
    predict the features of the masked part. ``MODEL.TEACHER`` configures the teacher.
    """

    pretrain_only_modules = ("projection", "predictor", "head")
    optional_modules = ("predictor",)
    needs_targets = True

    @configurable
    def __init__(
        self,
        *,
        backbone: Backbone,
        in_feature: str,
        target: str,
        target_channels: int,
        dim: int,
        predictor: HeatPredictor | None,
        **others: Any,
    ) -> None:
        """
        Args:
            backbone: the encoder.
            in_feature: name of the encoder's feature map.
            target: name of the teacher's feature map.
            target_channels: channels T of the teacher's feature map.
            dim: width C of the projected features.
            predictor: predicts the features of the masked part, or None if the whole image is
                visible.
            others: the other arguments of ``PretrainingModel``.
        """
        super().__init__(
            backbone=backbone, in_feature=in_feature, head_in_features=[in_feature], **others
        )
        self.target = target
        channels = backbone.output_shape()[in_feature].channels
        self.projection = nn.Linear(channels, dim)
        self.predictor = predictor
        self.head = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, target_channels))

    @classmethod
    def from_config(cls, cfg: CfgNode) -> dict[str, Any]:
        node = cfg.MODEL.QB_HEAT
        teacher = cfg.MODEL.TEACHER
        image_size = cfg.INPUT.PRETRAIN.SIZE
        known = (*OFFSETS, "both", "whole")
        check_value(node.VISIBLE in known, "QB_HEAT.VISIBLE", node.VISIBLE, f"one of {known}")
        check_value(node.FEATURE_DIM >= 1, "QB_HEAT.FEATURE_DIM", node.FEATURE_DIM, "at least 1")
        target = find_teacher_shape(cfg)
        backbone = build_backbone(cfg)
        multiple = 1
        predictor = None
        if node.VISIBLE != "whole":
            multiple = QBHeat.grid_multiple
            predictor = HeatPredictor(
                dim=node.FEATURE_DIM, num_models=node.NUM_MODELS, visible=node.VISIBLE
            )
        shapes = backbone.output_shape()
        shape = find_feature_map(
            shapes,
            node.IN_FEATURE,
            image_size,
            multiple=multiple,
            key="MODEL.QB_HEAT.IN_FEATURE",
        )
        grid = image_size // shape.stride
        if grid * target.stride != teacher.IMAGE_SIZE:
            raise UserError(
                f"MODEL.TEACHER.IMAGE_SIZE is {teacher.IMAGE_SIZE}, expected "
                f"{grid * target.stride}: '{teacher.IN_FEATURE}' of the teacher needs {grid} x "
                f"{grid} positions, as '{node.IN_FEATURE}' of the encoder"
            )
        return {
            "backbone": backbone,
            "in_feature": node.IN_FEATURE,
            "image_size": image_size,
            "target": teacher.IN_FEATURE,
            "target_channels": target.channels,
            "dim": node.FEATURE_DIM,
            "predictor": predictor,
            "pixel_mean": cfg.MODEL.PIXEL_MEAN,
            "pixel_std": cfg.MODEL.PIXEL_STD,
        }

    @classmethod
    def views_from_config(cls, cfg: CfgNode) -> Mapping[str, Sequence[str]]:
        """Returns the kinds of views that the config's model evaluates, each with its quarters.

        If the whole image is visible, the only kind is "image", without quarters.
        """
        return QBHeat.views_from_config(cfg) or {"image": ()}

    def forward(self, batched_inputs: list[dict[str, Any]]) -> Any:
        """
        Args:
            batched_inputs: dicts with "image" (3, S, S) and "targets", a dict with the teacher's
                feature map (T, G, G). In evaluation on quarters, also "place", the name of the
                visible quarter.

        Returns:
            In training, ``{"loss_feature": scalar}``. In evaluation, such a dict for each image,
            with "place" if there are quarters. In evaluation without "targets", one
            ``{"target": (T, G, G)}`` per image: the teacher's normalized feature map as predicted
            from the whole image.
        """
        images = self.preprocess_image(batched_inputs)
        if not self.training and "targets" not in batched_inputs[0]:
            predicted = self.head(self.encode(images)).permute(0, 3, 1, 2)
            return [{"target": image} for image in predicted]
        targets = self.stack_targets(batched_inputs)
        quarters: VisibleQuarters | None = None
        if self.predictor is None:
            z = self.encode(images)
        else:
            quarters = self.choose_quarters(self.predictor.visible, batched_inputs)
            images = images[quarters.order]
            targets = targets[quarters.order]
            z = self.encode(quarters.crop(images))  # (N, G / 2, G / 2, C)
            z = self.predictor(z, quarters.counts)  # (N, G, G, C)
        losses = feature_loss(self.head(z), targets)
        if self.training:
            return {"loss_feature": losses.mean()}
        results = [{"loss_feature": loss} for loss in losses]
        if quarters is None:
            return results
        return quarters.restore_order(results)

    def encode(self, images: Tensor) -> Tensor:
        """Takes images or quarters of them, (N, 3, H, W). Returns features (N, h, w, C)."""
        feature_map = self.backbone(images)[self.in_feature]
        return self.projection(feature_map.permute(0, 2, 3, 1))

    def stack_targets(self, batched_inputs: list[dict[str, Any]]) -> Tensor:
        """Returns the teacher's features of all images, (N, G, G, T)."""
        # Features are cached in float16, which autocast to bfloat16 cannot stack.
        with torch.autocast(self.device.type, enabled=False):
            stacked = torch.stack([entry["targets"][self.target] for entry in batched_inputs])
        return stacked.to(self.device, non_blocking=True).permute(0, 2, 3, 1)

    def choose_quarters(
        self, visible: str, batched_inputs: list[dict[str, Any]]
    ) -> VisibleQuarters:
        """Returns the quarters to encode: random in training, "place" of each input in evaluation.

        ``visible`` is the value of ``MODEL.QB_HEAT.VISIBLE``.
        """
        if self.training:
            return VisibleQuarters.draw(len(batched_inputs), visible=visible, device=self.device)
        quadrants = [entry["place"] for entry in batched_inputs]
        return VisibleQuarters.at(quadrants, device=self.device)


def feature_loss(predicted: Tensor, target: Tensor) -> Tensor:
    """Returns the smooth L1 loss of each image, (N,). Both arguments are (N, G, G, T)."""
    target = F.layer_norm(target.float(), target.shape[-1:])
    error = F.smooth_l1_loss(predicted.float(), target, beta=_BETA, reduction="none")
    return error.flatten(1).mean(dim=1)
