# Copyright (c) qbheat_det contributors. Apache-2.0.
"""A frozen network whose features others are trained to predict."""

from typing import Any

import torch
from detectron2.config import CfgNode, configurable
from detectron2.layers import ShapeSpec
from torch import Tensor

from qbheat_det.modeling.image_model import ImageModel

from .timm_backbone import TimmBackbone


class Teacher(ImageModel):
    """A timm network and the map of it that is the target of ``FeatureDistillation``.

    It has an image size and pixel statistics of its own, those of ``MODEL.TEACHER``.
    """

    mapper_name = "pretrain"

    @configurable
    def __init__(self, **parts: Any) -> None:
        """As ``ImageModel``; ``backbone`` is frozen."""
        super().__init__(**parts)
        self.eval()

    @classmethod
    def from_config(cls, cfg: CfgNode) -> dict[str, Any]:
        node = cfg.MODEL.TEACHER
        return {
            "backbone": _build(cfg),
            "in_feature": node.IN_FEATURE,
            "head_in_features": [node.IN_FEATURE],
            "image_size": node.IMAGE_SIZE,
            "pixel_mean": node.PIXEL_MEAN,
            "pixel_std": node.PIXEL_STD,
        }

    @torch.inference_mode()
    def forward(self, batched_inputs: list[dict[str, Any]]) -> dict[str, Tensor]:
        """
        Args:
            batched_inputs: dicts of a dataset mapper with "image" (3, S, S).

        Returns:
            The map by its name, (N, C, S / stride, S / stride).
        """
        maps: dict[str, Tensor] = self.backbone(self.preprocess_image(batched_inputs))
        return maps


def find_teacher_map(cfg: CfgNode) -> ShapeSpec:
    """Returns channels and stride of the teacher's map, without memory for its weights."""
    with torch.device("meta"):
        return _build(cfg).output_shape()[cfg.MODEL.TEACHER.IN_FEATURE]


def _build(cfg: CfgNode) -> TimmBackbone:
    node = cfg.MODEL.TEACHER
    return TimmBackbone(name=node.NAME, out_features=[node.IN_FEATURE], freeze_at=5)
