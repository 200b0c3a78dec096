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
    deviation of the candidates' IoUs, and whose center is in the box. An anchor that is positive
    for several boxes is assigned to the box with the highest IoU.

    As in the authors' code, the standard deviation is unbiased (divisor n - 1 for n candidates).
    It is 0 for one candidate. A center is in the box if it is more than 0.01 pixels from each side.
    Deviation from the paper: a box without positives gets the candidate with the highest IoU.

    Attributes:
        top_k: number of candidates per box and level (9 in the paper).
    """

    top_k: int = 9

    def __call__(self, anchors: list[Boxes], boxes: Boxes) -> Tensor:
        """Returns the index of each anchor's box, (R,). It is -1 for background.

        Args:
            anchors: anchors of each level, XYXY in pixels.
            boxes: the M boxes of the image, XYXY in pixels.
        """
        if not len(boxes):
            num_anchors = sum(len(level) for level in anchors)
            return torch.full((num_anchors,), -1, device=boxes.device)
        all_anchors = Boxes.cat(anchors)
        candidates = self._find_candidates(anchors, boxes)  # (M, n)
        overlaps = pairwise_iou(boxes, all_anchors)  # (M, R)
        candidate_overlaps = overlaps.gather(1, candidates)  # (M, n)

        # A single value has no unbiased deviation.
        correction = min(1, candidate_overlaps.shape[1] - 1)
        deviation = candidate_overlaps.std(1, correction=correction, keepdim=True)
        threshold = candidate_overlaps.mean(1, keepdim=True) + deviation

        centers = all_anchors.get_centers()[candidates]  # (M, n, 2)
        top_left = boxes.tensor[:, None, :2]  # (M, 1, 2)
        bottom_right = boxes.tensor[:, None, 2:]
        distances = torch.cat([centers - top_left, bottom_right - centers], dim=-1)  # (M, n, 4)
        is_inside = distances.amin(-1) > _MARGIN
        is_positive = (candidate_overlaps >= threshold) & is_inside  # (M, n)

        # Boxes without positives get their best candidate.
        best = candidate_overlaps.argmax(1, keepdim=True)
        is_best = torch.zeros_like(is_positive).scatter_(1, best, True)
        has_positives = is_positive.any(1, keepdim=True)
        is_positive |= is_best & ~has_positives

        # The IoU of each box with its positive anchors, and -1 for all other pairs.
        positive_overlaps = torch.full_like(overlaps, -1.0)
        positive_overlaps.scatter_(1, candidates, candidate_overlaps.where(is_positive, -1.0))
        highest_overlap, box_index = positive_overlaps.max(0)  # (R,) each
        return box_index.where(highest_overlap >= 0, -1)

    def _find_candidates(self, anchors: list[Boxes], boxes: Boxes) -> Tensor:
        """Returns the indices (M, n) of each box's n candidates among the anchors of all levels."""
        candidates = []
        first_index = 0  # of the anchors of a level
        for level in anchors:
            distances = torch.cdist(
                boxes.get_centers(),
                level.get_centers(),
                compute_mode="donot_use_mm_for_euclid_dist",  # TF32 products would be too inexact
            )
            num_candidates = min(self.top_k, len(level))
            nearest = distances.topk(num_candidates, largest=False).indices
            candidates.append(first_index + nearest)
            first_index += len(level)
        return torch.cat(candidates, dim=1)
