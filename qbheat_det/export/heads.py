# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Heads of exported models, which compute the file's outputs from the backbone's outputs.

Detectors return a variable number of boxes per image, but a graph needs fixed shapes. Therefore
these heads return tables with R rows per image. Inside the graph, empty rows have a score of -1.
"""

from collections.abc import Mapping
from typing import Any

import torch
from detectron2.modeling import RetinaNet
from detectron2.modeling.meta_arch.dense_detector import permute_to_N_HWA_K
from detectron2.modeling.meta_arch.fcos import FCOS
from torch import Tensor, nn
from torchvision.ops import box_convert, nms

from qbheat_det.core.errors import UserError
from qbheat_det.inference.exported import TASK_OUTPUTS, Task
from qbheat_det.layers import halve, padding_mask
from qbheat_det.modeling.classification import ImageClassifier
from qbheat_det.modeling.contracts import FixedSizeModel, get_backbone
from qbheat_det.modeling.detr import MFDETR

EMPTY = -1.0
"""Score of an empty row."""


class Head(nn.Module):
    """Computes the outputs of an exported file from the backbone's outputs ``self.in_features``.

    ``forward`` takes the backbone's outputs by name, and sizes (4,): H, W before the resize, and
    H', W' after it.
    """

    task: Task
    score_threshold = 0.0

    def __init__(self, in_features: list[str]) -> None:
        super().__init__()
        self.in_features = in_features

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the outputs in the order in which ``forward`` returns them."""
        return TASK_OUTPUTS.get(self.task, tuple(self.in_features))


class FeatureHead(Head):
    """Returns the backbone's outputs unchanged."""

    task = "features"

    def forward(self, features: Mapping[str, Tensor], sizes: Tensor) -> tuple[Tensor, ...]:
        return tuple(features[name] for name in self.in_features)


class ClassifierHead(Head):
    """Computes the softmax scores of the classes."""

    task = "classification"

    def __init__(self, model: ImageClassifier) -> None:
        super().__init__(list(model.head_in_features))
        self.decoder = model.decoder

    def forward(self, features: Mapping[str, Tensor], sizes: Tensor) -> tuple[Tensor, ...]:
        return (self.decoder(features).float().softmax(dim=1),)


class MFDETRHead(Head):
    """Runs MF-DETR's decoder; R is the number of queries."""

    task = "detection"

    def __init__(self, model: MFDETR) -> None:
        super().__init__(list(model.in_features))
        self.decoder = model.decoder
        self._read_scores = model.criterion.classification.scores
        self._is_padded = model.backbone.size_divisibility > 1

    def forward(self, features: Mapping[str, Tensor], sizes: Tensor) -> tuple[Tensor, ...]:
        maps = [features[name] for name in self.in_features]
        mask = None
        if self._is_padded:
            fine = maps[0]
            whole = padding_mask(sizes[None, 2:], (8 * fine.shape[2], 8 * fine.shape[3]))
            mask = halve(halve(halve(whole.expand(fine.shape[0], -1, -1, -1))))
        outputs = self.decoder(maps, mask)
        scores, labels = self._read_scores(outputs["pred_logits"][-1].float()).max(dim=-1)
        extent = sizes[2:].flip(0).repeat(2).to(scores.dtype)
        boxes = box_convert(outputs["pred_boxes"][-1], "cxcywh", "xyxy") * extent
        return sort_detections(torch.minimum(boxes.clamp(min=0), extent), scores, labels, sizes)


class DenseHead(Head):
    """Selects the top scores of RetinaNet or FCOS, then applies NMS.

    The tables have R = ``TEST.DETECTIONS_PER_IMAGE`` rows.
    """

    task = "detection"

    def __init__(self, model: RetinaNet | FCOS) -> None:
        super().__init__(list(model.head_in_features))
        self.head = model.head
        self.anchor_generator = model.anchor_generator
        self.score_threshold = float(model.test_score_thresh)
        self._transform = model.box2box_transform
        self._num_classes = int(model.num_classes)
        self._num_candidates = int(model.test_topk_candidates)
        self._iou_threshold = float(model.test_nms_thresh)
        self._num_rows = int(model.max_detections_per_image)

    def forward(self, features: Mapping[str, Tensor], sizes: Tensor) -> tuple[Tensor, ...]:
        maps = [features[name] for name in self.in_features]
        logits, deltas, *centerness = self.head(maps)
        levels_scores = [permute_to_N_HWA_K(x, self._num_classes).sigmoid() for x in logits]
        for centers in centerness:  # FCOS only
            pairs = zip(levels_scores, centers, strict=True)
            levels_scores = [(x * permute_to_N_HWA_K(y, 1).sigmoid()).sqrt() for x, y in pairs]
        anchors = self.anchor_generator(maps)
        levels = [
            self._select_top(scores, permute_to_N_HWA_K(level_deltas, 4), level_anchors.tensor)
            for scores, level_deltas, level_anchors in zip(
                levels_scores, deltas, anchors, strict=True
            )
        ]
        boxes, scores, labels = (torch.cat(parts, dim=1) for parts in zip(*levels, strict=True))
        scores = suppress_overlaps(boxes, scores, labels, self._num_classes, self._iou_threshold)
        scores, order = scores.topk(min(self._num_rows, scores.shape[1]), dim=1)
        boxes = boxes.gather(1, order[..., None].expand(-1, -1, 4))
        return sort_detections(boxes, scores, labels.gather(1, order), sizes)

    def _select_top(
        self, scores: Tensor, deltas: Tensor, anchors: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the T best boxes (N, T, 4), their scores (N, T) and labels (N, T) of one level.

        Takes scores (N, HWA, K), deltas (N, HWA, 4) and anchors (HWA, 4).
        """
        # Empty rows are appended, because a small level has fewer than T scores.
        flat = nn.functional.pad(scores.flatten(1), (0, self._num_candidates), value=EMPTY)
        best, index = flat.topk(self._num_candidates, dim=1)
        is_found = best > self.score_threshold
        index = torch.where(is_found, index, 0)
        rows = torch.div(index, self._num_classes, rounding_mode="floor")
        chosen = deltas.gather(1, rows[..., None].expand(-1, -1, 4))
        boxes = self._transform.apply_deltas(chosen.flatten(0, 1), anchors[rows.flatten()])
        scores = torch.where(is_found, best, EMPTY)
        return boxes.view(chosen.shape), scores, index - rows * self._num_classes


def sort_detections(
    boxes: Tensor, scores: Tensor, labels: Tensor, sizes: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scales boxes to the input image, clips and sorts them, and drops boxes without area.

    Args:
        boxes: (N, R, 4), XYXY in pixels of the resized image.
        scores: (N, R), ``EMPTY`` if there is no box.
        labels: (N, R), class indices.
        sizes: (4,): H, W, H', W' in pixels, before and after the resize.

    Returns:
        The outputs "boxes", "scores", "labels" and "counts", see ``ExportInfo``.
    """
    lengths = sizes.to(boxes.dtype)
    scale = (lengths[:2] / lengths[2:]).flip(0).repeat(2)
    boxes = torch.minimum((boxes * scale).clamp(min=0), lengths[:2].flip(0).repeat(2))
    has_area = (boxes[..., 2:] > boxes[..., :2]).all(dim=-1)
    scores = torch.where(has_area, scores, EMPTY)
    scores, order = scores.topk(scores.shape[1], dim=1)
    boxes = boxes.gather(1, order[..., None].expand(-1, -1, 4))
    return boxes, scores.clamp(min=0), labels.gather(1, order), (scores > EMPTY).sum(dim=1)


@torch.library.custom_op("qbheat_det::suppress_overlaps", mutates_args=())
def suppress_overlaps(
    boxes: Tensor, scores: Tensor, labels: Tensor, num_classes: int, iou_threshold: float
) -> Tensor:
    """Non-maximum suppression for each image and class of a batch, as one operator in the graph.

    Args:
        boxes: (N, M, 4), XYXY.
        scores: (N, M), ``EMPTY`` if there is no box.
        labels: (N, M), in [0, ``num_classes``).
        num_classes: number of classes.
        iou_threshold: boxes with a larger IoU with a better box of the same class are suppressed.

    Returns:
        The scores (N, M), ``EMPTY`` for suppressed boxes.
    """
    image, row = (scores > EMPTY).nonzero().unbind(dim=1)
    # Boxes of different images and classes get offsets, so they do not overlap. Offsets are large,
    # and float64 keeps the IoUs exact enough.
    group = image * num_classes + labels[image, row]
    offset = 2 * (boxes.abs().max().double() + 1) * group
    best = scores[image, row]
    kept = nms(boxes[image, row].double() + offset[:, None], best.double(), iou_threshold)
    return torch.full_like(scores, EMPTY).index_put((image[kept], row[kept]), best[kept])


@suppress_overlaps.register_fake
def _(boxes: Tensor, scores: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(scores)


def _translate(boxes: Any, scores: Any, labels: Any, num_classes: int, iou_threshold: float) -> Any:
    """Translates ``suppress_overlaps`` to ONNX's NonMaxSuppression, which separates classes."""
    from onnxscript import opset18

    op: Any = opset18  # accepts Python's numbers as constants, unlike its annotations
    classes = op.Constant(value_ints=list(range(num_classes)))
    is_class = op.Equal(op.Unsqueeze(labels, [1]), op.Unsqueeze(classes, [0, 2]))
    empty = op.Constant(value_float=EMPTY)
    class_scores = op.Where(is_class, op.Unsqueeze(scores, [1]), empty)  # (N, K, M)
    selected = op.NonMaxSuppression(
        boxes,
        class_scores,
        op.Gather(op.Shape(scores), [1]),  # keep up to M boxes
        op.Constant(value_floats=[iou_threshold]),
        op.Constant(value_floats=[0.0]),
    )
    kept = op.Gather(selected, [0, 2], axis=1)  # image and row
    return op.ScatterND(op.Expand(empty, op.Shape(scores)), kept, op.GatherND(scores, kept))


ONNX_TRANSLATIONS: dict[Any, Any] = {torch.ops.qbheat_det.suppress_overlaps.default: _translate}
"""Functions that translate this package's operators to ONNX operators."""


def build_head(model: nn.Module) -> Head:
    """Returns the head of a model, or raises a ``UserError`` if it cannot be exported."""
    if isinstance(model, MFDETR):
        return MFDETRHead(model)
    if isinstance(model, RetinaNet | FCOS):
        return DenseHead(model)
    if isinstance(model, ImageClassifier):
        return ClassifierHead(model)
    backbone = get_backbone(model)
    if backbone is not None and isinstance(model, FixedSizeModel):
        return FeatureHead(list(backbone.output_shape()))
    raise UserError(
        f"{type(model).__name__} cannot be exported; MF-DETR, RetinaNet, FCOS, classifiers and "
        "pre-trained backbones can"
    )
