# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Base class of pre-training objectives, which learn from one feature map of a backbone.

A subclass adds the layers of its objective and a ``forward`` that returns losses in training. The
dataset mapper decodes and crops images. The model draws the objective's random choices, such as
masks. ``forward`` also takes these choices as an optional argument, for tests and figures.

``ProjectionHead`` is the two-layer MLP without BatchNorm of "Improved Baselines with Momentum
Contrastive Learning" (MoCo-v2), arXiv:2003.04297.
"""

import logging
from collections.abc import Mapping
from typing import Any

from detectron2.config import CfgNode
from detectron2.layers import ShapeSpec
from detectron2.modeling import Backbone, build_backbone
from torch import Tensor, nn
from torch.nn import functional as F

from qbheat_det.core.errors import UserError
from qbheat_det.modeling.image_model import ImageModel, PooledFeatures

logger = logging.getLogger(__name__)


class PretrainingModel(ImageModel):
    """A backbone to pre-train, and the name of its feature map that the objective learns from."""

    pretrain_only_modules: tuple[str, ...] = ()
    mapper_name = "pretrain"
    held_out_loss = True

    def __init__(
        self, *, backbone: Backbone, in_feature: str, image_size: int, **others: Any
    ) -> None:
        """See ``ImageModel``. Raises a ``ValueError`` if the backbone has no such feature map."""
        shape = find_map(backbone.output_shape(), in_feature, image_size)
        for name, other in backbone.output_shape().items():
            if (other.stride or 0) > shape.stride:
                logger.warning(
                    f"The objective learns from '{in_feature}': the layers after it, up to "
                    f"'{name}', keep their random weights"
                )
        super().__init__(backbone=backbone, in_feature=in_feature, image_size=image_size, **others)


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
        self.hidden = nn.Linear(self.pool.width, hidden_dim)
        self.out = nn.Linear(hidden_dim, dim)

    @property
    def in_features(self) -> list[str]:
        """Names of the backbone's outputs that the head reads."""
        return self.pool.in_features

    def forward(self, features: Mapping[str, Tensor]) -> Tensor:
        """Takes a feature map (N, C, H, W) and optional "tokens". Returns unit-norm rows (N, D)."""
        projected = self.out(F.relu(self.hidden(self.pool(features))))
        # Float32 even under autocast, because half precision is too coarse near a similarity of 1.
        return F.normalize(projected.float(), dim=1)


def embedding_from_config(
    cfg: CfgNode, node: CfgNode, *, multiple: int | None = None
) -> dict[str, Any]:
    """Returns the arguments of ``PretrainingModel``, and a ``ProjectionHead`` as "head".

    ``node`` is the objective's config node with the keys ``IN_FEATURE``, ``HIDDEN_DIM`` and
    ``DIM``. For ``multiple``, see ``find_map``.
    """
    backbone, size = build_backbone(cfg), cfg.INPUT.PRETRAIN.SIZE
    shapes = backbone.output_shape()
    find_map(shapes, node.IN_FEATURE, size, multiple=multiple)  # raises before the head is built
    return {
        "backbone": backbone,
        "head": ProjectionHead(
            input_shape=shapes, in_feature=node.IN_FEATURE, hidden_dim=node.HIDDEN_DIM, dim=node.DIM
        ),
        "in_feature": node.IN_FEATURE,
        "image_size": size,
        "pixel_mean": cfg.MODEL.PIXEL_MEAN,
        "pixel_std": cfg.MODEL.PIXEL_STD,
    }


def check_equal_shares(batch_size: int, processes: int) -> None:
    """Raises a ``UserError`` if the batch cannot be split equally among the processes."""
    if batch_size % processes:
        raise UserError(
            f"SOLVER.IMS_PER_BATCH {batch_size} is not a multiple of the {processes} processes: "
            "this objective compares images of all processes, so each needs equally many"
        )


def find_map(
    shapes: Mapping[str, ShapeSpec], name: str, image_size: int, *, multiple: int | None = None
) -> ShapeSpec:
    """Returns the shape of a backbone's feature map. Raises a ``ValueError`` if it does not exist.

    If ``multiple`` is given, also raises a ``ValueError`` unless the image's side is a multiple of
    the stride, and the feature map's side is a multiple of ``multiple``.
    """
    strides = {key: shape.stride for key, shape in shapes.items() if shape.stride}
    if name not in strides:
        raise ValueError(
            f"IN_FEATURE '{name}' is no map of the backbone, which has the strides {strides}: add "
            "it to MODEL.MOBILE_FORMER.OUT_FEATURES or MODEL.TIMM.OUT_FEATURES"
        )
    side = (multiple or 1) * strides[name]
    if image_size < 1 or (multiple and image_size % side):
        nearest = max(1, round(image_size / side)) * side
        raise ValueError(
            f"'{name}' has stride {strides[name]}, so the image's side must be a multiple of "
            f"{side}, not {image_size}: set INPUT.PRETRAIN.SIZE to {nearest}"
        )
    return shapes[name]
