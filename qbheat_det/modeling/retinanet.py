# Copyright (c) qbheat_det contributors. Apache-2.0.
"""RetinaNet with losses normalized over all processes, and ATSS as an option.

RetinaNet (arXiv:1708.02002) assigns anchors by fixed IoU thresholds, which few anchors reach for a
small box. With ATSS, see ``atss.py``, one anchor per position is enough.

In shapes, R is the number of anchors of all levels.
"""

from typing import Any

import torch
from detectron2.config import CfgNode, configurable
from detectron2.modeling import META_ARCH_REGISTRY
from detectron2.modeling.meta_arch import RetinaNet
from detectron2.structures import Boxes, Instances
from detectron2.structures.boxes import matched_pairwise_iou
from torch import Tensor
from torch.nn import functional as F
from torchvision.ops import generalized_box_iou_loss

from .atss import AtssAssigner
from .dense_pseudo_labels import DensePseudoLabelLoss, SemiSupervisedDetector
from .loss_normalizer import COUNT
from .losses import quality_focal_loss


@META_ARCH_REGISTRY.register()
class SyncRetinaNet(SemiSupervisedDetector, RetinaNet):
    """RetinaNet whose losses are normalized over the effective batch.

    With one process, one micro-batch and no ``assigner``, the losses equal Detectron2's. With an
    ``assigner``, ATSS assigns the anchors, scores learn the IoU of the predicted boxes (as in
    arXiv:2006.04388), and boxes learn with the GIoU loss.
    """

    first_normalizer = 100.0

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
            "assigner": assigner,
            "giou_weight": node.GIOU_WEIGHT,
        }

    @torch.no_grad()
    def label_anchors(
        self, anchors: list[Boxes], gt_instances: list[Instances]
    ) -> tuple[list[Tensor], list[Tensor]]:
        if self.assigner is None:
            return super().label_anchors(anchors, gt_instances)
        labels = []
        boxes = []
        for truth in gt_instances:
            index = self.assigner(anchors, truth.gt_boxes)
            # Index -1 is the appended entry: background, which has no box.
            labels.append(F.pad(truth.gt_classes, (0, 1), value=self.num_classes)[index])
            boxes.append(F.pad(truth.gt_boxes.tensor, (0, 0, 0, 1))[index])
        return labels, boxes

    def losses(
        self,
        anchors: list[Boxes],
        pred_logits: list[Tensor],
        gt_labels: list[Tensor],
        pred_anchor_deltas: list[Tensor],
        gt_boxes: list[Tensor],
    ) -> dict[str, Tensor]:
        if self.assigner is None:
            return super().losses(anchors, pred_logits, gt_labels, pred_anchor_deltas, gt_boxes)
        # (N, R), (N, R, K), and the image and row of each of P positive anchors.
        labels = torch.stack(gt_labels)
        logits = torch.cat(pred_logits, dim=1).float()
        image, row = (labels != self.num_classes).nonzero(as_tuple=True)

        # (P, 4), XYXY in pixels.
        deltas = torch.cat(pred_anchor_deltas, dim=1).float()[image, row]
        positive_anchors = Boxes.cat(anchors).tensor[row]
        predicted_boxes = self.box2box_transform.apply_deltas(deltas, positive_anchors)
        true_boxes = torch.stack(gt_boxes)[image, row]

        targets = torch.zeros_like(logits)
        overlaps = matched_pairwise_iou(Boxes(predicted_boxes.detach()), Boxes(true_boxes))
        targets[image, row, labels[image, row]] = overlaps
        class_losses = quality_focal_loss(logits, targets, self.focal_loss_gamma)
        box_losses = generalized_box_iou_loss(predicted_boxes, true_boxes)
        return {
            "loss_cls": class_losses.sum(),
            "loss_box_reg": self.giou_weight * box_losses.sum(),
            COUNT: self.count_positives(gt_labels),
        }
