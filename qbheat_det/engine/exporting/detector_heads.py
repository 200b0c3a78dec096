# Copyright (c) qbheat_det contributors. Apache-2.0.
"""From a detector's feature maps to rows of boxes, inside the graph.

What the detectors do image by image, with as many boxes as there happen to be, is done here for a
whole batch in tables of fixed size, where a score of -1 marks a row that holds nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from detectron2.modeling.meta_arch.dense_detector import DenseDetector, permute_to_N_HWA_K
from torch import Tensor, nn
from torchvision.ops import box_convert

from qbheat_det.layers import halve, padding_mask
from qbheat_det.modeling.detr import MFDETR

Suppress = Callable[[Tensor, Tensor, Tensor, int, float], Tensor]
NOTHING = -1.0
"""Score of a row that holds nothing."""


class Detections(nn.Module):
    """The last step: boxes in pixels of the input image, the best first."""

    def forward(
        self, boxes: Tensor, scores: Tensor, labels: Tensor, sizes: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """
        Args:
            boxes: (N, R, 4), XYXY in pixels of the resized image.
            scores: (N, R).
            labels: (N, R).
            sizes: (4,): H, W, H', W' of the image before and after the resize.

        Returns:
            "boxes" (N, R, 4), "scores" (N, R), "labels" (N, R) and "counts" (N,), as in
            ``ExportInfo``. As Detectron2 does, boxes are clipped, and those left out of which
            nothing remains.
        """
        lengths = sizes.to(boxes.dtype)
        scale = (lengths[:2] / lengths[2:]).flip(0).repeat(2)
        limit = lengths[:2].flip(0).repeat(2)
        boxes = torch.minimum((boxes * scale).clamp(min=0), limit)
        is_box = (boxes[..., 2:] > boxes[..., :2]).all(dim=-1)
        scores = torch.where(is_box, scores, NOTHING)
        scores, order = scores.topk(scores.shape[1], dim=1)
        boxes = boxes.gather(1, order[..., None].expand(-1, -1, 4))
        counts = (scores > NOTHING).sum(dim=1)
        return boxes, scores.clamp(min=0), labels.gather(1, order), counts


class MFDETRHead(nn.Module):
    """MF-DETR's decoder and the reading of its queries; R is their number."""

    def __init__(self, model: MFDETR) -> None:
        """
        Args:
            model: in evaluation mode.
        """
        super().__init__()
        self.decoder = model.decoder
        self.in_features = list(model.in_features)
        self.finish = Detections()
        self._read_scores = model.criterion.classification.scores
        self._is_padded = model.backbone.size_divisibility > 1

    def forward(self, features: Mapping[str, Tensor], sizes: Tensor) -> tuple[Tensor, ...]:
        """
        Args:
            features: the backbone's outputs, of which ``in_features`` are read.
            sizes: see ``Detections``.
        """
        maps = [features[name] for name in self.in_features]
        outputs = self.decoder(maps, self._padding(maps[0], sizes) if self._is_padded else None)
        scores, labels = self._read_scores(outputs["pred_logits"][-1].float()).max(dim=-1)
        extent = sizes[2:].flip(0).repeat(2).to(scores.dtype)
        boxes = box_convert(outputs["pred_boxes"][-1], "cxcywh", "xyxy") * extent
        boxes = torch.minimum(boxes.clamp(min=0), extent)
        rows: tuple[Tensor, ...] = self.finish(boxes, scores, labels, sizes)
        return rows

    def _padding(self, fine: Tensor, sizes: Tensor) -> Tensor | None:
        whole = (8 * fine.shape[2], 8 * fine.shape[3])
        mask = padding_mask(sizes[None, 2:], whole).expand(fine.shape[0], -1, -1, -1)
        return halve(halve(halve(mask)))


class DenseHead(nn.Module):
    """Top scores of each level and suppression of overlaps, as Detectron2's RetinaNet and FCOS.

    R is the largest number of detections in an image.
    """

    def __init__(self, model: DenseDetector, *, suppress: Suppress) -> None:
        """
        Args:
            model: in evaluation mode.
            suppress: from boxes (N, M, 4), scores (N, M), labels (N, M), the number of classes and
                the IoU above which the lesser of two boxes of a class goes, to scores (N, M),
                ``NOTHING`` where the box goes.
        """
        super().__init__()
        self.head = model.head
        self.in_features = list(model.head_in_features)
        self.anchor_generator = model.anchor_generator
        self.finish = Detections()
        self._transform = model.box2box_transform
        self._num_classes = int(model.num_classes)
        self._threshold = float(model.test_score_thresh)
        self._num_candidates = int(model.test_topk_candidates)
        self._overlap = float(model.test_nms_thresh)
        self._num_rows = int(model.max_detections_per_image)
        self._suppress = suppress

    def forward(self, features: Mapping[str, Tensor], sizes: Tensor) -> tuple[Tensor, ...]:
        """
        Args:
            features: of the pyramid, of which ``in_features`` are read.
            sizes: see ``Detections``.
        """
        maps = [features[name] for name in self.in_features]
        levels = [
            self._choose(logits, deltas, anchors.tensor)
            for logits, deltas, anchors in zip(
                *self._predict(maps), self.anchor_generator(maps), strict=True
            )
        ]
        boxes, scores, labels = (torch.cat(parts, dim=1) for parts in zip(*levels, strict=True))
        scores = self._suppress(boxes, scores, labels, self._num_classes, self._overlap)
        scores, order = scores.topk(min(self._num_rows, scores.shape[1]), dim=1)
        boxes = boxes.gather(1, order[..., None].expand(-1, -1, 4))
        rows: tuple[Tensor, ...] = self.finish(boxes, scores, labels.gather(1, order), sizes)
        return rows

    def _predict(self, maps: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Returns for each level scores (N, HWA, K) and box deltas (N, HWA, 4)."""
        logits, deltas, *centredness = self.head(maps)
        scores = [permute_to_N_HWA_K(x, self._num_classes).sigmoid() for x in logits]
        for own in centredness:  # FCOS says how far a position is from the middle of its object
            pairs = zip(scores, own, strict=True)
            scores = [(x * permute_to_N_HWA_K(y, 1).sigmoid()).sqrt() for x, y in pairs]
        return scores, [permute_to_N_HWA_K(x, 4) for x in deltas]

    def _choose(
        self, scores: Tensor, deltas: Tensor, anchors: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns a level's best: boxes (N, T, 4), scores (N, T) and labels (N, T)."""
        # Rows of nothing behind them, so that a small level too has T to choose from.
        flat = nn.functional.pad(scores.flatten(1), (0, self._num_candidates), value=NOTHING)
        best, index = flat.topk(self._num_candidates, dim=1)
        is_found = best > self._threshold
        index = torch.where(is_found, index, 0)
        places = torch.div(index, self._num_classes, rounding_mode="floor")
        chosen = deltas.gather(1, places[..., None].expand(-1, -1, 4))
        boxes = self._transform.apply_deltas(chosen.flatten(0, 1), anchors[places.flatten()])
        return (
            boxes.view(chosen.shape),
            torch.where(is_found, best, NOTHING),
            index - places * self._num_classes,
        )


def build_head(model: nn.Module, suppress: Suppress) -> nn.Module | None:
    """Returns the part of a detector that reads its backbone, or None of a model of another kind.

    Args:
        model: in evaluation mode.
        suppress: see ``DenseHead``.
    """
    if isinstance(model, MFDETR):
        return MFDETRHead(model)
    needed: tuple[Any, ...] = ("box2box_transform", "test_nms_thresh", "anchor_generator")
    if isinstance(model, DenseDetector) and all(hasattr(model, name) for name in needed):
        return DenseHead(model, suppress=suppress)
    return None
