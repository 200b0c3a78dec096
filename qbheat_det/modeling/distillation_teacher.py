# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The teacher of distillation: the frozen network that ``MODEL.TEACHER`` names.

The objective ``FeatureDistillation`` learns to predict the teacher's features. These are computed
once, before training, and cached (``feature_cache/distillation_targets.py``).
"""

from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.layers import ShapeSpec
from torch import Tensor

from qbheat_det.config import configurable
from qbheat_det.core.errors import UserError

from .backbone import TimmBackbone
from .image_model import ImageModel


class DistillationTeacher(ImageModel):
    """The frozen timm network of ``MODEL.TEACHER``, whose features are distilled."""

    mapper_name = "pretrain"

    @configurable
    def __init__(self, **parts: Any) -> None:
        """Takes the arguments of ``ImageModel``. ``backbone`` must already be frozen."""
        super().__init__(**parts)
        self.eval()

    @classmethod
    def from_config(cls, cfg: CfgNode) -> dict[str, Any]:
        node = cfg.MODEL.TEACHER
        return {
            "backbone": build_teacher_backbone(cfg),
            "in_feature": node.IN_FEATURE,
            "head_in_features": [node.IN_FEATURE],
            "image_size": node.IMAGE_SIZE,
            "pixel_mean": node.PIXEL_MEAN,
            "pixel_std": node.PIXEL_STD,
        }

    @torch.inference_mode()
    def forward(self, batched_inputs: list[dict[str, Any]]) -> dict[str, Tensor]:
        """Takes dicts with "image" (3, S, S) and returns feature maps (N, C, H, W) by name."""
        return self.backbone(self.preprocess_image(batched_inputs))


def build_teacher_backbone(cfg: CfgNode) -> TimmBackbone:
    """Builds the teacher's frozen network. Raises a ``UserError`` if timm has no such network."""
    node = cfg.MODEL.TEACHER
    try:
        return TimmBackbone(
            name=node.NAME, out_features=[node.IN_FEATURE], freeze_at=TimmBackbone.freeze_all
        )
    except UserError as error:
        raise UserError(f"MODEL.TEACHER.NAME: {error}") from None


def find_teacher_shape(cfg: CfgNode) -> ShapeSpec:
    """Returns channels and stride of the teacher's output without allocating its weights."""
    with torch.device("meta"):  # tensors without memory
        return build_teacher_backbone(cfg).output_shape()[cfg.MODEL.TEACHER.IN_FEATURE]
