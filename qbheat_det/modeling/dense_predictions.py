# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What a dense detector predicts, before score threshold and NMS.

In shapes, R is the number of anchors or locations of all levels, and R_i that of level i.
"""

from dataclasses import dataclass

import torch
from detectron2.modeling.box_regression import Box2BoxTransform, Box2BoxTransformLinear
from detectron2.structures import Boxes
from torch import Tensor


@dataclass(frozen=True)
class DensePredictions:
    """Predictions of a dense detector at R anchors or locations of N images.

    Attributes:
        logits: (N, R, K), class logits for a sigmoid.
        boxes: (N, R, 4), XYXY, in pixels of the padded batch.
        quality: (N, R), centerness logits; None for RetinaNet.
    """

    logits: Tensor
    boxes: Tensor
    quality: Tensor | None = None


@dataclass(frozen=True)
class DenseLevels:
    """Outputs of a dense detector's head for N images, level by level.

    Attributes:
        features: (N, C, H_i, W_i), the maps that the head reads.
        anchors: R_i anchors, or boxes around locations, XYXY, in pixels of the padded batch.
        logits: (N, R_i, K), class logits for a sigmoid.
        deltas: (N, R_i, 4), boxes relative to their anchors.
        quality: (N, R_i, 1), centerness logits; empty for RetinaNet.
    """

    features: list[Tensor]
    anchors: list[Boxes]
    logits: list[Tensor]
    deltas: list[Tensor]
    quality: list[Tensor]

    def decode(self, transform: Box2BoxTransform | Box2BoxTransformLinear) -> DensePredictions:
        """Returns the predictions of all levels. ``transform`` turns deltas into boxes."""
        anchors = Boxes.cat(self.anchors).tensor  # (R, 4)
        deltas = torch.cat(self.deltas, dim=1)  # (N, R, 4)
        boxes = [transform.apply_deltas(image, anchors) for image in deltas]
        quality = None
        if self.quality:
            quality = torch.cat(self.quality, dim=1).squeeze(2)  # (N, R)
        logits = torch.cat(self.logits, dim=1)  # (N, R, K)
        return DensePredictions(logits=logits, boxes=torch.stack(boxes), quality=quality)
