# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The projection head of objectives that compare images: MoCo and Wasserstein dependency.

It is the two-layer MLP without BatchNorm of "Improved Baselines with Momentum Contrastive Learning"
(MoCo-v2), arXiv:2003.04297.
"""

from collections.abc import Mapping
from typing import Any

from detectron2.config import CfgNode
from detectron2.layers import ShapeSpec
from detectron2.modeling import build_backbone
from torch import Tensor, nn
from torch.nn import functional as F

from qbheat_det.modeling.pooling import PooledFeatures

from .base import find_feature_map


class ProjectionHead(nn.Module):
    """Pools a backbone's outputs and projects them to one unit-norm vector per image."""

    def __init__(
        self, *, input_shape: Mapping[str, ShapeSpec], in_feature: str, hidden_dim: int, dim: int
    ) -> None:
        """Takes the backbone's ``output_shape()``, the feature map's name, and the layer widths."""
        super().__init__()
        if min(hidden_dim, dim) < 1:
            raise ValueError(f"HIDDEN_DIM and DIM are at least 1, not {hidden_dim} and {dim}")
        self.pool = PooledFeatures(input_shape=input_shape, in_feature=in_feature)
        self.in_features = self.pool.in_features  # the backbone's outputs that the head reads
        self.hidden = nn.Linear(self.pool.width, hidden_dim)
        self.out = nn.Linear(hidden_dim, dim)

    def forward(self, features: Mapping[str, Tensor]) -> Tensor:
        """Takes a feature map (N, C, H, W) and optional "tokens". Returns unit-norm rows (N, D)."""
        projected = self.out(F.relu(self.hidden(self.pool(features))))
        # Float32 even under autocast, because half precision is too coarse near a similarity of 1.
        return F.normalize(projected.float(), dim=1)


def embedding_from_config(
    cfg: CfgNode, group: str, *, multiple: int | None = None
) -> dict[str, Any]:
    """Returns the arguments of ``PretrainingModel``, and a ``ProjectionHead`` as "head".

    ``group`` is the name of the objective's keys in ``cfg.MODEL``, such as "MOCO". Among them are
    ``IN_FEATURE``, ``HIDDEN_DIM`` and ``DIM``. If ``multiple`` is given, height and width of the
    feature map must be a multiple of it.
    """
    node = cfg.MODEL[group]
    backbone = build_backbone(cfg)
    shapes = backbone.output_shape()
    image_size = cfg.INPUT.PRETRAIN.SIZE
    # Raises an error if the feature map does not fit.
    find_feature_map(
        shapes,
        node.IN_FEATURE,
        image_size,
        multiple=multiple,
        key=f"MODEL.{group}.IN_FEATURE",
    )
    return {
        "backbone": backbone,
        "head": ProjectionHead(
            input_shape=shapes, in_feature=node.IN_FEATURE, hidden_dim=node.HIDDEN_DIM, dim=node.DIM
        ),
        "in_feature": node.IN_FEATURE,
        "image_size": image_size,
        "pixel_mean": cfg.MODEL.PIXEL_MEAN,
        "pixel_std": cfg.MODEL.PIXEL_STD,
    }
