# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Pre-training by prediction of the features of a frozen teacher, from a quarter or the whole.

The encoder sees a quarter of the image and linear models predict the features of the rest, as in
QB-Heat (arXiv:2211.13228); what they are compared with is not the pixels but the map of a network
that others have trained. With the whole image visible it is plain feature distillation; the target
and the loss are those of arXiv:2205.14141: each feature vector is brought to mean 0 and variance 1,
and the error is a smooth L1 loss of β = 2.
"""

from typing import Any

import torch
from detectron2.config import CfgNode, configurable
from detectron2.modeling import META_ARCH_REGISTRY, Backbone, build_backbone
from torch import Tensor, nn
from torch.nn import functional as F

from qbheat_det.core.errors import UserError
from qbheat_det.modeling.backbone.timm_backbone import find_teacher_map

from .base import PretrainingModel, find_map
from .heat_predictor import HeatPredictor
from .qb_heat import VisibleQuarters

_BETA = 2.0


@META_ARCH_REGISTRY.register()
class FeatureDistillation(PretrainingModel):
    """An encoder of a part of the image, linear predictions of the rest, and a linear layer.

    Both maps have G x G positions over the image. ``MODEL.QB_HEAT`` has the keys of the part that
    is visible, of the linear models and of the projection; ``MODEL.TEACHER`` those of the teacher.
    """

    pretrain_only_modules = ("projection", "predictor", "head")
    held_out_loss = False
    needs_teacher = True

    @configurable
    def __init__(
        self,
        *,
        backbone: Backbone,
        in_feature: str,
        image_size: int,
        dim: int,
        target_channels: int,
        predictor: HeatPredictor | None,
        **statistics: Any,
    ) -> None:
        """As ``PretrainingModel``, and:

        Args:
            backbone: has the output ``in_feature``.
            in_feature: name of the backbone's map.
            image_size: S, rows and columns of the images.
            dim: C of the features that are predicted.
            target_channels: of the teacher's map.
            predictor: of the features of the hidden part; None if the whole image is visible.
            statistics: ``pixel_mean`` and ``pixel_std``, see ``ImageModel``.
        """
        super().__init__(
            backbone=backbone,
            in_feature=in_feature,
            head_in_features=[in_feature],
            image_size=image_size,
            **statistics,
        )
        channels = backbone.output_shape()[in_feature].channels
        self.projection = nn.Linear(channels, dim)
        self.predictor = predictor
        self.head = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, target_channels))

    @classmethod
    def from_config(cls, cfg: CfgNode) -> dict[str, Any]:
        node, size = cfg.MODEL.QB_HEAT, cfg.INPUT.PRETRAIN.SIZE
        whole = node.VISIBLE == "whole"
        backbone = build_backbone(cfg)
        shape = find_map(backbone.output_shape(), node.IN_FEATURE, size, multiple=1 if whole else 4)
        target = find_teacher_map(cfg)
        grid, teacher_grid = size // shape.stride, cfg.MODEL.TEACHER.IMAGE_SIZE / target.stride
        if grid != teacher_grid:
            raise UserError(
                f"MODEL.TEACHER.IMAGE_SIZE is {cfg.MODEL.TEACHER.IMAGE_SIZE}, expected "
                f"{grid * target.stride}: both maps need {grid} x {grid} positions"
            )
        predictor = (
            HeatPredictor(dim=node.FEATURE_DIM, num_models=node.NUM_MODELS, visible=node.VISIBLE)
            if not whole
            else None
        )
        return {
            "backbone": backbone,
            "in_feature": node.IN_FEATURE,
            "image_size": size,
            "dim": node.FEATURE_DIM,
            "target_channels": target.channels,
            "predictor": predictor,
            "pixel_mean": cfg.MODEL.PIXEL_MEAN,
            "pixel_std": cfg.MODEL.PIXEL_STD,
        }

    def forward(self, batched_inputs: list[dict[str, Any]]) -> Any:
        """
        Args:
            batched_inputs: dicts of a dataset mapper: "image" (3, S, S) and, in training,
                "target" (T, G, G), the teacher's map of the same view.

        Returns:
            {"loss_feature"}, (), in training; else for each image {"target"}, the predicted map,
            of vectors of mean 0 and variance 1, from the whole image.
        """
        images = self.preprocess_image(batched_inputs)
        if not self.training:
            predicted = self.head(self._encode(images)).permute(0, 3, 1, 2)
            return [{"target": single} for single in predicted]
        # In float32: autocast on CPUs cannot stack half precision.
        target = torch.stack([entry["target"].float() for entry in batched_inputs]).to(self.device)
        if self.predictor is None:
            z = self._encode(images)
        else:
            quarters = VisibleQuarters.draw(
                len(images), visible=self.predictor.visible, device=self.device
            )
            images, target = images[quarters.order], target[quarters.order]
            z = self.predictor(self._encode(quarters.crop(images)), quarters.counts)
        return {"loss_feature": feature_loss(self.head(z), target.permute(0, 2, 3, 1))}

    def _encode(self, images: Tensor) -> Tensor:
        """From images (N, 3, H, W) to projected features (N, h, w, C)."""
        features: Tensor = self.projection(
            self.backbone(images)[self.in_feature].permute(0, 2, 3, 1)
        )
        return features


def feature_loss(predicted: Tensor, target: Tensor) -> Tensor:
    """Returns the mean error (), of predictions and a teacher's features (N, G, G, T)."""
    target = F.layer_norm(target.float(), target.shape[-1:])
    return F.smooth_l1_loss(predicted.float(), target, beta=_BETA)
