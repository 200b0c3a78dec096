# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Detectron2's RetinaNet and FCOS, with losses normalised over all processes.

Papers: "Focal Loss for Dense Object Detection", arXiv:1708.02002, and "FCOS: A Simple and Strong
Anchor-free Object Detector", arXiv:2006.09214. Detectron2 builds its FCOS from LazyConfigs only;
here it is registered and built from ``MODEL.FCOS`` too. Two bugs of v0.6, fixed on main, are fixed
here: labels of images without boxes, and heads with GroupNorm on a recent PyTorch. All else is
Detectron2's, parameter names included.
"""

from collections.abc import Sequence
from typing import Any

from detectron2.config import CfgNode, configurable
from detectron2.layers import ShapeSpec
from detectron2.modeling import META_ARCH_REGISTRY, build_backbone
from detectron2.modeling.meta_arch import RetinaNet
from detectron2.modeling.meta_arch.fcos import FCOS, FCOSHead
from detectron2.structures import Boxes, Instances
from torch import Tensor, nn

from .normalizer import SyncNormalizer


@META_ARCH_REGISTRY.register()
class SyncRetinaNet(SyncNormalizer, RetinaNet):
    """RetinaNet whose gradients are those of the effective batch.

    In one process, and without micro-batches, it is Detectron2's ``RetinaNet``.
    """

    first_normalizer = 100.0

    @configurable
    def __init__(self, **kwargs: Any) -> None:
        """
        Args:
            kwargs: as for ``RetinaNet``.
        """
        super().__init__(**kwargs)


@META_ARCH_REGISTRY.register()
class SyncFCOS(SyncNormalizer, FCOS):
    """FCOS whose gradients are those of the effective batch.

    In one process, and without micro-batches, it is Detectron2's ``FCOS``.
    """

    first_normalizer = 300.0

    @configurable
    def __init__(self, **kwargs: Any) -> None:
        """
        Args:
            kwargs: as for ``FCOS``.
        """
        super().__init__(**kwargs)

    @classmethod
    def from_config(cls, cfg: CfgNode) -> dict[str, Any]:
        node, backbone = cfg.MODEL.FCOS, build_backbone(cfg)
        shapes = backbone.output_shape()
        if set(node.IN_FEATURES) - set(shapes):
            raise ValueError(
                f"MODEL.FCOS.IN_FEATURES {list(node.IN_FEATURES)} are not all among the "
                f"backbone's outputs {list(shapes)}"
            )
        input_shape = [shapes[name] for name in node.IN_FEATURES]
        return {
            "backbone": backbone,
            "head": build_fcos_head(
                input_shape=input_shape,
                num_classes=node.NUM_CLASSES,
                conv_dims=[input_shape[0].channels] * node.NUM_CONVS,
                prior_prob=node.PRIOR_PROB,
                norm=node.NORM,
            ),
            "head_in_features": node.IN_FEATURES,
            "num_classes": node.NUM_CLASSES,
            "center_sampling_radius": node.CENTER_SAMPLING_RADIUS,
            "focal_loss_alpha": node.FOCAL_LOSS_ALPHA,
            "focal_loss_gamma": node.FOCAL_LOSS_GAMMA,
            "test_score_thresh": node.SCORE_THRESH_TEST,
            "test_topk_candidates": node.TOPK_CANDIDATES_TEST,
            "test_nms_thresh": node.NMS_THRESH_TEST,
            "max_detections_per_image": cfg.TEST.DETECTIONS_PER_IMAGE,
            "pixel_mean": cfg.MODEL.PIXEL_MEAN,
            "pixel_std": cfg.MODEL.PIXEL_STD,
        }

    def label_anchors(
        self, anchors: list[Boxes], gt_instances: list[Instances]
    ) -> tuple[list[Tensor], Any]:
        """As in ``FCOS``, for images without boxes too: all of their locations are background."""
        return super().label_anchors(anchors, [_or_empty_box(found) for found in gt_instances])


def build_fcos_head(
    *,
    input_shape: Sequence[ShapeSpec],
    num_classes: int,
    conv_dims: Sequence[int],
    norm: str,
    prior_prob: float,
) -> FCOSHead:
    """Returns Detectron2's head for levels from fine to coarse; arguments as there."""
    return FCOSHead(
        input_shape=list(input_shape),
        num_classes=num_classes,
        conv_dims=list(conv_dims),
        norm=_group_norm if norm == "GN" else norm,
        prior_prob=prior_prob,
    )


def _group_norm(channels: int) -> nn.GroupNorm:
    # v0.6 builds the norm for one channel to check its kind, where 32 groups are too many.
    return nn.GroupNorm(min(32, channels), channels)


def _or_empty_box(instances: Instances) -> Instances:
    """Returns the instances, or one box without area, which contains no location."""
    if len(instances):
        return instances
    return Instances(
        instances.image_size,
        gt_boxes=Boxes(instances.gt_boxes.tensor.new_zeros(1, 4)),
        gt_classes=instances.gt_classes.new_zeros(1),
    )
