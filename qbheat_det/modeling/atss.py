# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Adaptive training sample selection, ATSS (arXiv:1912.02424), for RetinaNet and MF-DETR.

ATSS computes an IoU threshold for each box from the anchors near its center.

In shapes, M is the number of boxes of an image, and R the number of anchors of all levels.
"""

from dataclasses import dataclass

import torch
from detectron2.structures import Boxes, pairwise_iou
from torch import Tensor

_MARGIN = 0.01  # least distance of a center from the sides of its box, in pixels


@dataclass(frozen=True)
class AtssAssigner:
    """Assigns anchors to the boxes of one image.

    Candidates of a box are the ``top_k`` anchors of each level whose centers are nearest to the
    center of the box. Positives are the candidates whose IoU is at least the mean plus the standard
    deviation of the candidates' IoUs, and whose center is in the box. As in the authors' code, the
    standard deviation is unbiased, with divisor n - 1 for n candidates (0 for one candidate), and a
    center is in the box if it is more than 0.01 pixels from each side. In contrast to the paper, a
    box without positives gets its best candidate. An anchor that is positive for several boxes is
    assigned to the box with the highest IoU.

    Attributes:
        top_k: number of candidates per box and level (9 in the paper).
    """

    top_k: int = 9

    def __call__(self, anchors: list[Boxes], boxes: Boxes) -> Tensor:
        """Returns the index (R,) of each anchor's box, or -1 for background.

        Args:
            anchors: anchors of each level, XYXY in pixels.
            boxes: the M boxes of the image, XYXY in pixels.
        """
        if not len(boxes):
            return torch.full((sum(map(len, anchors)),), -1, device=boxes.device)
        every = Boxes.cat(anchors)
        candidates = self._nearest(anchors, boxes)
        overlaps = pairwise_iou(boxes, every)
        near = overlaps.gather(1, candidates)
        # One value has no unbiased deviation.
        deviation = near.std(1, correction=min(1, near.shape[1] - 1), keepdim=True)
        centers, corners = every.get_centers()[candidates], boxes.tensor[:, None]
        distances = torch.cat([centers - corners[..., :2], corners[..., 2:] - centers], dim=-1)
        inside = distances.amin(-1) > _MARGIN
        positive = (near >= near.mean(1, keepdim=True) + deviation) & inside
        best = torch.zeros_like(positive).scatter_(1, near.argmax(1, keepdim=True), True)
        positive |= best & ~positive.any(1, keepdim=True)
        quality = torch.full_like(overlaps, -1.0)
        quality.scatter_(1, candidates, near.where(positive, -1.0))
        value, index = quality.max(0)
        return index.where(value >= 0, -1)

    def _nearest(self, anchors: list[Boxes], boxes: Boxes) -> Tensor:
        """Returns the indices (M, …) of each box's candidates among the anchors of all levels."""
        rows, start = [], 0
        for level in anchors:
            # A matrix product would be too inexact under TF32.
            exact = "donot_use_mm_for_euclid_dist"
            distances = torch.cdist(boxes.get_centers(), level.get_centers(), compute_mode=exact)
            count = min(self.top_k, len(level))
            rows.append(distances.topk(count, largest=False).indices + start)
            start += len(level)
        return torch.cat(rows, dim=1)
