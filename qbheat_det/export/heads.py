# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Heads of exported models, which compute the file's outputs from the backbone's outputs.

Detectors return a variable number of boxes per image, but a graph needs fixed shapes. Therefore
these heads return R rows per image, where rows without a box are empty. Inside the graph, empty
rows have a score of -1.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from detectron2.modeling import FPN, RetinaNet
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
from qbheat_det.modeling.joined import JoinedDetectors

EMPTY = -1.0
"""Score of an empty row."""


class Head(nn.Module):
    """Base of heads. ``forward`` computes the outputs of an exported file.

    It takes the backbone's outputs by name, and sizes (4,): H, W of the images before the resize,
    and H', W' after it. Heads read the backbone's outputs ``in_features``.
    """

    task: Task
    score_threshold = 0.0
    """Lowest score of detections that the file returns."""

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
    """Runs MF-DETR's decoder. R is the number of queries."""

    task = "detection"

    def __init__(self, model: MFDETR) -> None:
        super().__init__(list(model.in_features))
        self.decoder = model.decoder
        self._read_scores = model.criterion.classification.scores
        self._is_padded = model.backbone.size_divisibility > 1

    def forward(self, features: Mapping[str, Tensor], sizes: Tensor) -> tuple[Tensor, ...]:
        maps = [features[name] for name in self.in_features]  # at strides 8, 16, …
        padding = None
        if self._is_padded:
            num_images, _, height, width = maps[0].shape
            image_sizes = sizes[None, 2:]  # (1, 2): H', W'
            pixel_padding = padding_mask(image_sizes, (8 * height, 8 * width))
            pixel_padding = pixel_padding.expand(num_images, -1, -1, -1)
            padding = halve(halve(halve(pixel_padding)))  # (N, 1, height, width)
        outputs = self.decoder(maps, padding)
        class_scores = self._read_scores(outputs["pred_logits"][-1].float())  # (N, R, K)
        scores, labels = class_scores.max(dim=-1)
        extent = sizes[2:].flip(0).repeat(2).to(scores.dtype)  # (4,): W', H', W', H'
        boxes = box_convert(outputs["pred_boxes"][-1], "cxcywh", "xyxy") * extent
        boxes = torch.minimum(boxes.clamp(min=0), extent)
        return sort_detections(boxes, scores, labels, sizes)


class DenseHead(Head):
    """Selects the highest scores of RetinaNet or FCOS on each level, then applies NMS.

    R, the number of rows per image, is ``TEST.DETECTIONS_PER_IMAGE``.
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
        # A feature map per level in each list. Only FCOS predicts centerness.
        logits, deltas, *centerness = self.head(maps)
        anchors = self.anchor_generator(maps)
        level_boxes = []
        level_scores = []
        level_labels = []
        for level in range(len(maps)):
            scores = permute_to_N_HWA_K(logits[level], self._num_classes).sigmoid()
            if centerness:
                center_scores = permute_to_N_HWA_K(centerness[0][level], 1).sigmoid()
                scores = (scores * center_scores).sqrt()
            boxes, scores, labels = self._select_top(
                scores, permute_to_N_HWA_K(deltas[level], 4), anchors[level].tensor
            )
            level_boxes.append(boxes)
            level_scores.append(scores)
            level_labels.append(labels)
        boxes = torch.cat(level_boxes, dim=1)  # (N, levels * T, 4)
        scores = torch.cat(level_scores, dim=1)
        labels = torch.cat(level_labels, dim=1)
        scores = suppress_overlaps(boxes, scores, labels, self._num_classes, self._iou_threshold)
        num_rows = min(self._num_rows, scores.shape[1])
        scores, order = scores.topk(num_rows, dim=1)  # (N, R)
        boxes = boxes.gather(1, order[..., None].expand(-1, -1, 4))
        labels = labels.gather(1, order)
        return sort_detections(boxes, scores, labels, sizes)

    def _select_top(
        self, scores: Tensor, deltas: Tensor, anchors: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the T best boxes (N, T, 4), their scores (N, T) and labels (N, T) of one level.

        Takes scores (N, HWA, K), deltas (N, HWA, 4) and anchors (HWA, 4), where A is the number of
        anchors per position. Boxes whose score is not above the threshold get the score ``EMPTY``.
        """
        # Empty scores are appended, because a small level has fewer than T scores.
        flat_scores = nn.functional.pad(scores.flatten(1), (0, self._num_candidates), value=EMPTY)
        top_scores, index = flat_scores.topk(self._num_candidates, dim=1)  # (N, T)
        is_above = top_scores > self.score_threshold
        top_scores = torch.where(is_above, top_scores, EMPTY)
        index = torch.where(is_above, index, 0)  # indices of appended scores would be out of range
        # An index counts classes within anchors.
        anchor_index = torch.div(index, self._num_classes, rounding_mode="floor")
        labels = index - anchor_index * self._num_classes
        top_deltas = deltas.gather(1, anchor_index[..., None].expand(-1, -1, 4))  # (N, T, 4)
        boxes = self._transform.apply_deltas(
            top_deltas.flatten(0, 1), anchors[anchor_index.flatten()]
        )
        return boxes.view(top_deltas.shape), top_scores, labels


class JoinedBranch(nn.Module):
    """The feature pyramid (if it has one) and the head of one of several joined detectors."""

    def __init__(self, detector: nn.Module, class_indices: Sequence[int]) -> None:
        """
        Args:
            detector: a copy for export. The encoder of its feature pyramid is replaced.
            class_indices: the class index in the joined detector of each class, or -1.
        """
        super().__init__()
        self.pyramid: nn.Module = nn.Identity()
        backbone = get_backbone(detector)
        if isinstance(backbone, FPN):
            backbone.bottom_up = nn.Identity()
            self.pyramid = backbone
        self.head = build_head(detector)
        self.register_buffer("class_indices", torch.tensor(class_indices))
        self.class_indices: Tensor

    def forward(
        self, features: Mapping[str, Tensor], sizes: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns boxes (N, R, 4), scores (N, R), ``EMPTY`` without a box, and labels (N, R)."""
        boxes, scores, labels, counts = self.head(self.pyramid(features), sizes)
        labels = self.class_indices[labels]
        is_box = torch.arange(scores.shape[1], device=scores.device) < counts[:, None]
        scores = torch.where(is_box & (labels >= 0), scores, EMPTY)
        return boxes, scores, labels.clamp(min=0)


class JoinedHead(Head):
    """Runs several detectors on the outputs of one encoder.

    R is the sum of the detectors' rows, or ``TEST.DETECTIONS_PER_IMAGE`` if it is smaller.
    """

    task = "detection"

    def __init__(self, model: JoinedDetectors) -> None:
        """``model`` is a copy for export."""
        super().__init__(list(model.backbone.in_features))
        branches = [
            JoinedBranch(detector, indices)
            for detector, indices in zip(model.detectors, model.class_indices, strict=True)
        ]
        self.branches = nn.ModuleList(branches)
        self.score_threshold = min(branch.head.score_threshold for branch in branches)
        self._num_rows = model.max_detections

    def forward(self, features: Mapping[str, Tensor], sizes: Tensor) -> tuple[Tensor, ...]:
        found = [branch(features, sizes) for branch in self.branches]
        boxes, scores, labels = (torch.cat(parts, dim=1) for parts in zip(*found, strict=True))
        num_rows = min(self._num_rows, scores.shape[1])
        scores, order = scores.topk(num_rows, dim=1)  # (N, R)
        boxes = boxes.gather(1, order[..., None].expand(-1, -1, 4))
        labels = labels.gather(1, order)
        counts = (scores > EMPTY).sum(dim=1)
        return boxes, scores.clamp(min=0), labels, counts


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
        Boxes (N, R, 4), XYXY in pixels of the input image. Their scores (N, R), in descending
        order. Their labels (N, R). The number (N,) of rows that are not empty, which come first.
    """
    lengths = sizes.to(boxes.dtype)
    input_size = lengths[:2]  # H, W
    resized_size = lengths[2:]  # H', W'
    scale = (input_size / resized_size).flip(0).repeat(2)  # (4,), for x, y, x, y
    extent = input_size.flip(0).repeat(2)  # (4,): W, H, W, H
    boxes = torch.minimum((boxes * scale).clamp(min=0), extent)
    has_area = (boxes[..., 2:] > boxes[..., :2]).all(dim=-1)
    scores = torch.where(has_area, scores, EMPTY)
    scores, order = scores.topk(scores.shape[1], dim=1)
    boxes = boxes.gather(1, order[..., None].expand(-1, -1, 4))
    labels = labels.gather(1, order)
    counts = (scores > EMPTY).sum(dim=1)
    return boxes, scores.clamp(min=0), labels, counts


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
    image, row = (scores > EMPTY).nonzero().unbind(dim=1)  # (P,) each, of P boxes
    # A different offset for each image and class moves their boxes apart, so that one call of nms
    # is enough. In float64, the IoUs are exact enough in spite of large offsets.
    group = image * num_classes + labels[image, row]
    distance = 2 * (boxes.abs().max().double() + 1)
    offset = distance * group
    box_scores = scores[image, row]
    kept = nms(boxes[image, row].double() + offset[:, None], box_scores.double(), iou_threshold)
    return torch.full_like(scores, EMPTY).index_put((image[kept], row[kept]), box_scores[kept])


@suppress_overlaps.register_fake
def _(boxes: Tensor, scores: Tensor, *_: Any) -> Tensor:
    """Returns a tensor with the shape of the result, for tracing."""
    return torch.empty_like(scores)


def _translate(boxes: Any, scores: Any, labels: Any, num_classes: int, iou_threshold: float) -> Any:
    """Translates ``suppress_overlaps`` to ONNX's NonMaxSuppression, which separates classes."""
    from onnxscript import opset18

    op: Any = opset18  # Any, because its annotations do not allow Python numbers, which it accepts
    classes = op.Constant(value_ints=list(range(num_classes)))
    is_class = op.Equal(op.Unsqueeze(labels, [1]), op.Unsqueeze(classes, [0, 2]))
    empty = op.Constant(value_float=EMPTY)
    class_scores = op.Where(is_class, op.Unsqueeze(scores, [1]), empty)  # (N, K, M)
    selected = op.NonMaxSuppression(  # rows of (image, class, row)
        boxes,
        class_scores,
        op.Gather(op.Shape(scores), [1]),  # keep up to M boxes
        op.Constant(value_floats=[iou_threshold]),
        op.Constant(value_floats=[0.0]),  # lowest score, so that empty rows are not selected
    )
    kept = op.Gather(selected, [0, 2], axis=1)  # image and row
    return op.ScatterND(op.Expand(empty, op.Shape(scores)), kept, op.GatherND(scores, kept))


ONNX_TRANSLATIONS: dict[Any, Any] = {torch.ops.qbheat_det.suppress_overlaps.default: _translate}
"""Functions that translate this package's operators to ONNX operators."""


def build_head(model: nn.Module) -> Head:
    """Returns the head of a model, or raises a ``UserError`` if it cannot be exported."""
    if isinstance(model, JoinedDetectors):
        return JoinedHead(model)
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
