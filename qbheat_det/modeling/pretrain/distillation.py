# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Pre-training by predicting a frozen teacher's features from a quarter or the whole image.

As in QB-Heat (arXiv:2211.13228), the encoder sees a quarter of the image, and linear models predict
the features of the rest. The target is the feature map of a trained network instead of pixels. If
the whole image is visible, this is feature distillation. Target and loss follow arXiv:2205.14141:
each feature vector is normalized to mean 0 and variance 1, and the loss is smooth L1 with β = 2.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from detectron2.config import CfgNode, configurable
from detectron2.modeling import META_ARCH_REGISTRY, Backbone, build_backbone
from torch import Tensor, nn
from torch.nn import functional as F

from qbheat_det.core.errors import UserError
from qbheat_det.modeling.backbone.timm_backbone import find_teacher_maps

from .base import PretrainingModel, find_map
from .qb_heat import OFFSETS, HeatPredictor, QBHeat, VisibleQuarters

_BETA = 2.0


class MapPrediction(nn.Module):
    """Predicts a feature map of the teacher from a feature map of the encoder."""

    def __init__(
        self, *, channels: int, dim: int, target_channels: int, predictor: HeatPredictor | None
    ) -> None:
        """Takes the channels of the encoder's feature map, of the predictor and of the target.

        ``predictor`` predicts the features of the masked part. None if the whole image is visible.
        """
        super().__init__()
        self.projection = nn.Linear(channels, dim)
        self.predictor = predictor
        self.head = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, target_channels))


@META_ARCH_REGISTRY.register()
class FeatureDistillation(PretrainingModel):
    """Encodes a part of the image, predicts the rest linearly, and projects to the teacher's width.

    A feature map of the encoder and its target have the same number of positions, G x G.
    ``MODEL.QB_HEAT`` configures the visible part, the linear models and the projection.
    ``MODEL.TEACHER`` configures the teacher.
    """

    pretrain_only_modules = ("projection", "predictor", "head", "finer")
    optional_modules = ("predictor", "finer")
    needs_teacher = True

    @configurable
    def __init__(
        self,
        *,
        backbone: Backbone,
        in_feature: str,
        image_size: int,
        predictions: Mapping[str, MapPrediction],
        targets: Mapping[str, str],
        **statistics: Any,
    ) -> None:
        """Takes the arguments of ``PretrainingModel``, the ``predictions``, and ``targets``.

        Both have the names of the backbone's feature maps as keys. The values of ``targets`` are
        names of the teacher's feature maps.
        """
        super().__init__(
            backbone=backbone,
            in_feature=in_feature,
            head_in_features=list(predictions),
            image_size=image_size,
            **statistics,
        )
        self._targets = dict(targets)
        own = predictions[in_feature]
        self.projection, self.predictor, self.head = own.projection, own.predictor, own.head
        self.finer = nn.ModuleDict({k: v for k, v in predictions.items() if k != in_feature})

    @classmethod
    def from_config(cls, cfg: CfgNode) -> dict[str, Any]:
        node, size = cfg.MODEL.QB_HEAT, cfg.INPUT.PRETRAIN.SIZE
        known = find_teacher_maps(cfg)
        targets = {node.IN_FEATURE: cfg.MODEL.TEACHER.IN_FEATURE, **dict(cfg.MODEL.TEACHER.FINER)}
        if node.VISIBLE not in (visible := (*OFFSETS, "both", "whole")):
            raise UserError(f"MODEL.QB_HEAT.VISIBLE is one of {visible}, not '{node.VISIBLE}'")
        if node.FEATURE_DIM < 1:
            raise UserError(f"MODEL.QB_HEAT.FEATURE_DIM is at least 1, not {node.FEATURE_DIM}")
        backbone, predictions = build_backbone(cfg), {}
        whole = node.VISIBLE == "whole"
        for name, target in targets.items():
            multiple = 1 if whole else QBHeat.grid_multiple
            try:
                shape = find_map(backbone.output_shape(), name, size, multiple=multiple)
            except ValueError as error:
                raise UserError(f"MODEL.QB_HEAT or MODEL.TEACHER.FINER: {error}") from None
            grid, stride = size // shape.stride, known[target].stride
            if grid * stride != cfg.MODEL.TEACHER.IMAGE_SIZE:
                raise UserError(
                    f"MODEL.TEACHER.IMAGE_SIZE is {cfg.MODEL.TEACHER.IMAGE_SIZE}, expected "
                    f"{grid * stride}: '{target}' of the teacher needs {grid} x {grid} positions, "
                    f"as '{name}' of the encoder"
                )
            predictions[name] = MapPrediction(
                channels=shape.channels,
                dim=node.FEATURE_DIM,
                target_channels=known[target].channels,
                predictor=None if whole else HeatPredictor(
                    dim=node.FEATURE_DIM, num_models=node.NUM_MODELS, visible=node.VISIBLE
                ),
            )  # fmt: skip
        return {
            "backbone": backbone,
            "in_feature": node.IN_FEATURE,
            "image_size": size,
            "predictions": predictions,
            "targets": targets,
            "pixel_mean": cfg.MODEL.PIXEL_MEAN,
            "pixel_std": cfg.MODEL.PIXEL_STD,
        }

    @classmethod
    def views_from_config(cls, cfg: CfgNode) -> Mapping[str, Sequence[str]]:
        """Returns the views of ``QBHeat``, or the whole image. See ``get_views``."""
        return QBHeat.views_from_config(cfg) or {"image": ()}

    def forward(self, batched_inputs: list[dict[str, Any]]) -> Any:
        """Takes dicts with "image" (3, S, S) and "targets", the teacher's maps (T, G, G) by name.

        Returns scalar losses in training. In evaluation, returns one ``{"loss_feature": scalar}``
        per image, summed over feature maps. "place" is the visible quarter in evaluation, and is
        returned too. Without "targets", evaluation returns ``{"target": (T, G, G)}`` per image: the
        prediction of the normalized ``IN_FEATURE`` of the teacher from the whole image.
        """
        images = self.preprocess_image(batched_inputs)
        if not (self.training or "targets" in batched_inputs[0]):
            features = self.backbone(images)[self.in_feature]
            predicted = self.head(self.projection(features.permute(0, 2, 3, 1)))
            return [{"target": single} for single in predicted.permute(0, 3, 1, 2)]
        quarters = self._choose_quarters(batched_inputs)
        if quarters is not None:
            images = quarters.crop(images[quarters.order])
        features, losses = self.backbone(images), {}
        for name, target in self._targets.items():
            is_main = name == self.in_feature
            parts: Any = self if is_main else self.finer[name]
            z = parts.projection(features[name].permute(0, 2, 3, 1))
            wanted = self._stack_targets(batched_inputs, target)
            if quarters is not None:
                z, wanted = parts.predictor(z, quarters.counts), wanted[quarters.order]
            key = "loss_feature" if is_main else f"loss_feature_{name}"
            losses[key] = feature_loss(parts.head(z), wanted)
        if self.training:
            return {name: loss.mean() for name, loss in losses.items()}
        found = [{"loss_feature": loss} for loss in torch.stack([*losses.values()]).sum(dim=0)]
        return found if quarters is None else QBHeat.in_order(quarters, found)

    def _stack_targets(self, batched_inputs: list[dict[str, Any]], name: str) -> Tensor:
        """Returns a feature map of the teacher for all images, (N, G, G, T)."""
        # Features are cached in float16, which autocast to bfloat16 cannot stack.
        with torch.autocast(self.device.type, enabled=False):
            stacked = torch.stack([entry["targets"][name] for entry in batched_inputs])
        return stacked.to(self.device, non_blocking=True).permute(0, 2, 3, 1)

    def _choose_quarters(self, batched_inputs: list[dict[str, Any]]) -> VisibleQuarters | None:
        """Returns the visible quarters, at random in training, or None for the whole image."""
        if self.predictor is None:
            return None
        if not self.training:
            return VisibleQuarters.at([x["place"] for x in batched_inputs], device=self.device)
        visible, count = self.predictor.visible, len(batched_inputs)
        return VisibleQuarters.draw(count, visible=visible, device=self.device)


def feature_loss(predicted: Tensor, target: Tensor) -> Tensor:
    """Returns the mean loss of each image, (N,). Both arguments are (N, G, G, T)."""
    target = F.layer_norm(target.float(), target.shape[-1:])
    error = F.smooth_l1_loss(predicted.float(), target, beta=_BETA, reduction="none")
    return error.flatten(1).mean(dim=1)
