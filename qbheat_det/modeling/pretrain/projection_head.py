# Copyright (c) qbheat_det contributors. Apache-2.0.
"""From a backbone's outputs to one vector an image that is compared with others.

"Improved Baselines with Momentum Contrastive Learning" (MoCo-v2), arXiv:2003.04297, which takes the
perceptron of two layers from SimCLR, without BatchNorm.
"""

from collections.abc import Mapping
from typing import Any

from detectron2.config import CfgNode
from detectron2.layers import ShapeSpec
from detectron2.modeling import build_backbone
from torch import Tensor, nn
from torch.nn import functional as F

from qbheat_det.layers import PooledFeatures

from .pretraining_model import find_map


class ProjectionHead(nn.Module):
    """Pooled features, two layers, and vectors brought to length 1."""

    def __init__(
        self, *, input_shape: Mapping[str, ShapeSpec], in_feature: str, hidden_dim: int, dim: int
    ) -> None:
        """
        Args:
            input_shape: the backbone's ``output_shape()``, with ``in_feature``.
            in_feature: name of the map to pool; the first token joins it where there are tokens.
            hidden_dim: width between the two layers.
            dim: D of the result.

        Raises:
            ValueError: a width is not positive.
        """
        super().__init__()
        if min(hidden_dim, dim) < 1:
            raise ValueError(f"widths of the head must be at least 1, not {hidden_dim} and {dim}")
        self.pool = PooledFeatures(input_shape=input_shape, in_feature=in_feature)
        self.hidden = nn.Linear(self.pool.width, hidden_dim)
        self.out = nn.Linear(hidden_dim, dim)

    @property
    def in_features(self) -> list[str]:
        """Names of the backbone's outputs that are read."""
        return self.pool.in_features

    def forward(self, features: Mapping[str, Tensor]) -> Tensor:
        """
        Args:
            features: the map (N, C, H, W) and, where the backbone gives them, "tokens" (N, M, E).

        Returns:
            (N, D), float32, each row of length 1.
        """
        projected = self.out(F.relu(self.hidden(self.pool(features))))
        # In float32 under autocast too: half precision would blur similarities near one.
        return F.normalize(projected.float(), dim=1)


def embedding_from_config(
    cfg: CfgNode, node: CfgNode, *, multiple: int | None = None
) -> dict[str, Any]:
    """Builds what objectives that compare embeddings have in common.

    Args:
        cfg: the whole config.
        node: the objective's own keys, with ``IN_FEATURE``, ``HIDDEN_DIM`` and ``DIM``.
        multiple: see ``find_map``.

    Returns:
        Arguments of their constructors: those of ``PretrainingModel``, and "head".

    Raises:
        ValueError: the backbone has no such map, or a width is not positive.
    """
    backbone, size = build_backbone(cfg), cfg.INPUT.PRETRAIN.SIZE
    shapes = backbone.output_shape()
    # Before the head asks for its width, so that a wrong name has its sentence.
    find_map(shapes, node.IN_FEATURE, size, multiple=multiple)
    return {
        "backbone": backbone,
        "head": ProjectionHead(
            input_shape=shapes,
            in_feature=node.IN_FEATURE,
            hidden_dim=node.HIDDEN_DIM,
            dim=node.DIM,
        ),
        "in_feature": node.IN_FEATURE,
        "image_size": size,
        "pixel_mean": cfg.MODEL.PIXEL_MEAN,
        "pixel_std": cfg.MODEL.PIXEL_STD,
    }
