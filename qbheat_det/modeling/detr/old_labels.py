# Copyright (c) qbheat_det contributors. Apache-2.0.
"""How MF-DETR keeps its old classes while it learns new ones: pseudo-labels of the old detector.

Queries of two detectors do not correspond, so their scores cannot be compared one by one as in
``kept_classes.py``. Instead, the boxes that the old detector finds become labels of the old classes
that are not annotated in an image ("Continual Detection Transformer for Incremental Object
Detection", arXiv:2304.03110).
The rest of the image is background for these classes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.structures import Boxes, Instances
from torch import Tensor

from qbheat_det.modeling.contracts import ANNOTATED_CLASSES, OLD_PREDICTIONS


@dataclass(frozen=True)
class KeptClasses:
    """How many classes are kept, and how.

    Attributes:
        num_classes: number of old classes, which come first. With 0, there is no old detector.
        min_score: boxes of the old detector with at least this score become labels.
        feature_weight: factor on the loss that keeps the features of a trained backbone.
    """

    num_classes: int = 0
    min_score: float = 0.3
    feature_weight: float = 0.0

    @classmethod
    def from_config(cls, cfg: CfgNode) -> "KeptClasses":
        """Reads ``MODEL.KEEP_CLASSES`` of a config."""
        node = cfg.MODEL.KEEP_CLASSES
        return cls(node.NUM, node.MIN_SCORE, node.FEATURE_WEIGHT)


@dataclass(frozen=True)
class OldLabels:
    """What the old detector finds in an image.

    Attributes:
        instances: ``gt_boxes`` (XYXY, in pixels of the unpadded input image) and ``gt_classes``.
        features: (C, H, W) of each of the backbone's outputs; empty if they are not used.
    """

    instances: Instances
    features: Sequence[Tensor]


def select_labels(detections: Instances, kept: KeptClasses) -> Instances:
    """Returns the boxes of a detector that become labels. Boxes without area do not."""
    is_sure = detections.scores >= kept.min_score
    sure = detections[is_sure & detections.pred_boxes.nonempty()]
    return Instances(sure.image_size, gt_boxes=sure.pred_boxes, gt_classes=sure.pred_classes)


def add_old_labels(entry: Mapping[str, Any], num_kept: int, device: torch.device) -> dict[str, Any]:
    """Returns an image's dict with the labels of the old classes that are not annotated there.

    Then all ``num_kept`` old classes count as annotated.
    """
    if ANNOTATED_CLASSES not in entry:
        return dict(entry)
    labelled: Instances = entry["instances"].to(device)
    found = entry[OLD_PREDICTIONS].instances
    annotated = torch.tensor(list(entry[ANNOTATED_CLASSES]), device=device)
    found = found[~torch.isin(found.gt_classes, annotated)]
    instances = Instances(
        labelled.image_size,
        gt_boxes=Boxes.cat([labelled.gt_boxes, found.gt_boxes]),
        gt_classes=torch.cat([labelled.gt_classes, found.gt_classes]),
    )
    classes = sorted({*range(num_kept), *entry[ANNOTATED_CLASSES]})
    return {**entry, "instances": instances, ANNOTATED_CLASSES: classes}


def sum_feature_losses(
    features: Sequence[Tensor], batched_inputs: Sequence[Mapping[str, Any]]
) -> Tensor:
    """Returns the squared distance of features (N, C, H, W) from those of the old detector.

    It is a mean over channels, and a sum over positions, levels and images.
    """
    total = features[0].new_zeros((), dtype=torch.float32)
    for level, maps in enumerate(features):
        old = torch.stack([entry[OLD_PREDICTIONS].features[level] for entry in batched_inputs])
        total = total + (maps.float() - old).square().mean(dim=1).sum()
    return total
