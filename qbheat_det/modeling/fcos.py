# Copyright (c) qbheat_det contributors. Apache-2.0.
"""FCOS with losses normalized over all processes, and built from ``MODEL.FCOS``.

Paper: "FCOS: A Simple and Strong Anchor-free Object Detector", arXiv:2006.09214. Two fixes are from
Detectron2's main branch: images without boxes, and GroupNorm heads on a recent PyTorch.
"""

from typing import Any

from detectron2.config import CfgNode
from detectron2.modeling import META_ARCH_REGISTRY, build_backbone
from detectron2.modeling.meta_arch.fcos import FCOS, FCOSHead
from detectron2.structures import Boxes, Instances
from torch import Tensor, nn

from .contracts import pick_outputs
from .dense_pseudo_labels import DensePseudoLabelLoss, SemiSupervisedDetector
from .kept_classes import KeepsClasses, KeptClassLoss


@META_ARCH_REGISTRY.register()
class SyncFCOS(KeepsClasses, SemiSupervisedDetector, FCOS):
    """FCOS whose losses are normalized over the effective batch.

    With one process and one micro-batch, the losses equal Detectron2's, except for the two fixes in
    the module's docstring.
    """

    first_normalizer = 300.0  # as in Detectron2

    @classmethod
    def from_config(cls, cfg: CfgNode) -> dict[str, Any]:
        node = cfg.MODEL.FCOS
        backbone = build_backbone(cfg)
        input_shape = pick_outputs(backbone, node.IN_FEATURES, "MODEL.FCOS.IN_FEATURES")
        return {
            "pseudo_label_loss": DensePseudoLabelLoss.from_config(cfg),
            "kept_class_loss": KeptClassLoss.from_config(cfg),
            "backbone": backbone,
            "head": FCOSHead(
                input_shape=input_shape,
                num_classes=node.NUM_CLASSES,
                conv_dims=[input_shape[0].channels] * node.NUM_CONVS,
                prior_prob=node.PRIOR_PROB,
                norm=build_group_norm if node.NORM == "GN" else node.NORM,
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
        """Returns the class and the box of each location, per image.

        In images without boxes, all locations are background.
        """
        instances_with_boxes = [add_empty_box(instances) for instances in gt_instances]
        return super().label_anchors(anchors, instances_with_boxes)

    def losses(
        self, anchors: Any, pred_logits: list[Tensor], gt_labels: list[Tensor], *others: Any
    ) -> dict[str, Tensor]:
        """Returns the sums of the losses and the number of positive locations."""
        pred_anchor_deltas, *gt_boxes_and_centerness = others
        # torchvision's GIoU loss does not support autocast, so the deltas are cast to float32.
        deltas = [level.float() for level in pred_anchor_deltas]
        return super().losses(anchors, pred_logits, gt_labels, deltas, *gt_boxes_and_centerness)


def build_group_norm(channels: int) -> nn.GroupNorm:
    """Returns a GroupNorm of at most 32 groups.

    Detectron2 v0.6 builds the norm for 1 channel to check its type, which fails with 32 groups.
    """
    return nn.GroupNorm(min(32, channels), channels)


def add_empty_box(instances: Instances) -> Instances:
    """Adds a box without area if there is no box. Such a box matches no location."""
    if len(instances):
        return instances
    return Instances(
        instances.image_size,
        gt_boxes=Boxes(instances.gt_boxes.tensor.new_zeros(1, 4)),
        gt_classes=instances.gt_classes.new_zeros(1),
    )
