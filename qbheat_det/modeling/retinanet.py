# Copyright (c) qbheat_det contributors. Apache-2.0.
"""RetinaNet with losses normalized over all processes, and ATSS as an option.

RetinaNet (arXiv:1708.02002) assigns anchors to boxes by fixed IoU thresholds. For a small box, few
anchors reach them. ATSS (``atss.py``) computes a threshold for each box instead. With ATSS, one
anchor per position is enough.

In shapes, R is the number of anchors of all levels.
"""

from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.modeling import META_ARCH_REGISTRY
from detectron2.modeling.meta_arch import RetinaNet
from detectron2.structures import Boxes, Instances
from detectron2.structures.boxes import matched_pairwise_iou
from torch import Tensor
from torch.nn import functional as F
from torchvision.ops import generalized_box_iou_loss

from qbheat_det.config import configurable

from .atss import AtssAssigner
from .dense_pseudo_labels import DensePseudoLabelLoss, SemiSupervisedDetector
from .kept_classes import KeepsClasses, KeptClassLoss
from .loss_normalizer import COUNT
from .losses import quality_focal_loss


@META_ARCH_REGISTRY.register()
class SyncRetinaNet(KeepsClasses, SemiSupervisedDetector, RetinaNet):
    """RetinaNet whose losses are normalized over the effective batch.

    With one process, one micro-batch and no ``assigner``, the losses equal Detectron2's. With an
    ``assigner``, ATSS assigns the anchors, scores learn the IoU of the predicted boxes (as in
    arXiv:2006.04388), and boxes learn with the GIoU loss.
    """

    first_normalizer = 100.0  # as in Detectron2

    @configurable
    def __init__(
        self, *, assigner: AtssAssigner | None = None, giou_weight: float = 2.0, **kwargs: Any
    ) -> None:
        """Takes RetinaNet's arguments, the assigner, and the weight of its GIoU loss."""
        super().__init__(**kwargs)
        self.assigner = assigner
        self.giou_weight = giou_weight

    @classmethod
    def from_config(cls, cfg: CfgNode) -> dict[str, Any]:
        node = cfg.MODEL.RETINANET.ATSS
        assigner = None
        if node.ENABLED:
            assigner = AtssAssigner(top_k=node.TOP_K)
        return {
            **super().from_config(cfg),
            "pseudo_label_loss": DensePseudoLabelLoss.from_config(cfg),
            "kept_class_loss": KeptClassLoss.from_config(cfg),
            "assigner": assigner,
            "giou_weight": node.GIOU_WEIGHT,
        }

    @torch.no_grad()
    def label_anchors(
        self, anchors: list[Boxes], gt_instances: list[Instances]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Returns the class (R,) and the box (R, 4) of each anchor, per image.

        The class K is background, and -1 is ignored.
        """
        if self.assigner is None:
            return super().label_anchors(anchors, gt_instances)
        gt_labels = []
        gt_boxes = []
        for instances in gt_instances:
            index = self.assigner(anchors, instances.gt_boxes)  # (R,), -1 for background
            # An entry for background is appended, which index -1 selects.
            classes = F.pad(instances.gt_classes, (0, 1), value=self.num_classes)
            boxes = F.pad(instances.gt_boxes.tensor, (0, 0, 0, 1))
            gt_labels.append(classes[index])
            gt_boxes.append(boxes[index])
        return gt_labels, gt_boxes

    def losses(
        self,
        anchors: list[Boxes],
        pred_logits: list[Tensor],
        gt_labels: list[Tensor],
        pred_anchor_deltas: list[Tensor],
        gt_boxes: list[Tensor],
    ) -> dict[str, Tensor]:
        """Returns the sums of the losses and, as ``COUNT``, the number of positive anchors.

        Args:
            anchors: anchors of each level, XYXY in pixels.
            pred_logits: class logits (N, R_i, K) of each level with R_i anchors.
            gt_labels: classes (R,) of each image. K is background, and -1 is ignored.
            pred_anchor_deltas: box deltas (N, R_i, 4) of each level.
            gt_boxes: boxes (R, 4) of each image, XYXY in pixels.
        """
        if self.assigner is None:
            return super().losses(anchors, pred_logits, gt_labels, pred_anchor_deltas, gt_boxes)
        labels = torch.stack(gt_labels)  # (N, R)
        logits = torch.cat(pred_logits, dim=1).float()  # (N, R, K)
        deltas = torch.cat(pred_anchor_deltas, dim=1).float()  # (N, R, 4)

        # Image and anchor of each of P positives.
        image, anchor = (labels != self.num_classes).nonzero(as_tuple=True)
        positive_anchors = Boxes.cat(anchors).tensor[anchor]  # (P, 4)
        predicted_boxes = self.box2box_transform.apply_deltas(
            deltas[image, anchor], positive_anchors
        )
        true_boxes = torch.stack(gt_boxes)[image, anchor]

        # The target of a positive anchor is the IoU for its class, and 0 for other classes.
        targets = torch.zeros_like(logits)
        overlaps = matched_pairwise_iou(Boxes(predicted_boxes.detach()), Boxes(true_boxes))
        targets[image, anchor, labels[image, anchor]] = overlaps
        class_losses = quality_focal_loss(logits, targets, self.focal_loss_gamma)
        box_losses = generalized_box_iou_loss(predicted_boxes, true_boxes)
        return {
            "loss_cls": class_losses.sum(),
            "loss_box_reg": self.giou_weight * box_losses.sum(),
            COUNT: self.count_positives(gt_labels),
        }
