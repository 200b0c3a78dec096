# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The divisor of a dense detector's losses: a running mean of the number of positive anchors.

RetinaNet (arXiv:1708.02002) and FCOS (arXiv:2006.09214) divide their losses by the number of
positive anchors or locations. Detectron2 divides by a running mean of this number. There, each
process has another mean, and it is lost on resume. Here, the mean is over all processes, updated
once per step, and saved in checkpoints.
"""

import math
from typing import Any

import torch
from detectron2.modeling.meta_arch.dense_detector import DenseDetector
from detectron2.structures import ImageList
from detectron2.utils import comm
from torch import Tensor

from qbheat_det.config import configurable

from .annotated_classes import find_annotated, ignore_unannotated
from .cached_images import find_cached_images
from .dense_predictions import DenseLevels

COUNT = "num_positives"
"""Key of the number of positive anchors in the result of ``losses``."""
_MOMENTUM = 0.9  # of the running mean, as in Detectron2


class SyncNormalizer(DenseDetector):
    """Mixin that divides the losses of RetinaNet or FCOS by a running mean over all processes.

    The running mean is that of the number of positive anchors. The mixin also lets the detectors
    train on cached features.
    """

    learns_partial_labels = True
    """Whether the model reads ``ANNOTATED_CLASSES``."""
    first_normalizer: float
    """Initial value of the running mean, as in Detectron2."""

    @configurable
    def __init__(self, **kwargs: Any) -> None:
        """Takes the detector's arguments."""
        super().__init__(**kwargs)
        # The name is that of Detectron2's attribute, which is not a buffer.
        self.register_buffer("loss_normalizer", torch.tensor(self.first_normalizer))
        self.loss_normalizer: Tensor

    def forward(
        self, batched_inputs: list[dict[str, Any]], normalizers: Tensor | None = None
    ) -> Any:
        """Returns losses in training, and detections in evaluation.

        ``normalizers`` (1,) is the divisor of the losses. By default, it is computed from the
        batches of all processes.
        """
        if not self.training:
            return super().forward(batched_inputs)
        levels = self.predict_levels(batched_inputs)
        gt_instances = [entry["instances"].to(self.device) for entry in batched_inputs]
        gt_labels, gt_boxes = self.label_anchors(levels.anchors, gt_instances)
        sums = self.sum_losses(batched_inputs, levels, gt_labels, gt_boxes)
        if normalizers is None:
            count = sums[COUNT]
            num_processes = comm.get_world_size()
            if num_processes > 1:
                torch.distributed.all_reduce(count)
            normalizers = self.loss_normalizers(count, num_processes)
        divisor = normalizers[0]
        return {name: total / divisor for name, total in sums.items() if name != COUNT}

    def predict_levels(self, batched_inputs: list[dict[str, Any]]) -> DenseLevels:
        """Returns the outputs of the head for a batch."""
        maps = self.backbone(self.preprocess_image(batched_inputs).tensor)
        features = [maps[name] for name in self.head_in_features]
        outputs = self.head(features)
        widths = [self.num_classes, 4]
        if len(outputs) == 3:  # only FCOS also predicts a centerness
            widths.append(1)
        # Each level is (N, C, H, W) before, and (N, locations, width) after.
        logits, deltas, *quality = self._transpose_dense_predictions(outputs, widths)
        return DenseLevels(
            features=features,
            anchors=self.anchor_generator(features),
            logits=logits,
            deltas=deltas,
            quality=quality[0] if quality else [],
        )

    def sum_losses(
        self,
        batched_inputs: list[dict[str, Any]],
        levels: DenseLevels,
        gt_labels: list[Tensor],
        gt_boxes: Any,
    ) -> dict[str, Tensor]:
        """Returns the result of ``losses``, in which unannotated classes learn nothing.

        ``gt_labels`` and ``gt_boxes`` are the result of ``label_anchors``.
        """
        is_annotated = find_annotated(batched_inputs, self.num_classes, self.device)
        classes = torch.stack(gt_labels)  # (N, R)
        sizes = [level.shape[1] for level in levels.logits]
        logits = [
            ignore_unannotated(level_logits, is_annotated, level_classes)
            for level_logits, level_classes in zip(
                levels.logits, classes.split(sizes, dim=1), strict=True
            )
        ]
        others = [levels.quality] if levels.quality else []
        return self.losses(levels.anchors, logits, gt_labels, levels.deltas, gt_boxes, *others)

    def losses(
        self, anchors: Any, pred_logits: list[Tensor], gt_labels: list[Tensor], *others: Any
    ) -> dict[str, Tensor]:
        """Returns the sums of the detector's losses and, as ``COUNT``, the number of positives."""
        sums = super().losses(anchors, pred_logits, gt_labels, *others)
        return {**sums, COUNT: self.count_positives(gt_labels)}

    def loss_counts(self, batched_inputs: list[dict[str, Any]]) -> Tensor:
        """Returns the number (1,) of positive anchors in a batch. Does not run the backbone."""
        height, width = self.preprocess_image(batched_inputs).tensor.shape[-2:]
        # The anchor generator only reads the height and width of feature maps.
        empty_maps = []
        for stride in self.anchor_generator.strides:
            map_height = math.ceil(height / stride)
            map_width = math.ceil(width / stride)
            empty_maps.append(torch.empty(0, map_height, map_width))
        anchors = self.anchor_generator(empty_maps)
        gt_instances = [entry["instances"].to(self.device) for entry in batched_inputs]
        gt_labels, _ = self.label_anchors(anchors, gt_instances)
        return self.count_batch(batched_inputs, gt_labels)

    def count_batch(self, batched_inputs: list[dict[str, Any]], gt_labels: list[Tensor]) -> Tensor:
        """Returns the number (1,) of positive anchors in a batch. ``gt_labels`` are its labels."""
        return self.count_positives(gt_labels)

    def loss_normalizers(self, counts: Tensor, parts: int) -> Tensor:
        """Updates the running mean, and returns the divisor (1,) of each micro-batch's losses.

        ``counts`` (1,) is the number of positive anchors in all ``parts`` micro-batches of a step.
        """
        count = counts[0].clamp(min=1)
        self.loss_normalizer.mul_(_MOMENTUM).add_(count, alpha=1 - _MOMENTUM)
        return self.loss_normalizer[None] / parts

    def count_positives(self, gt_labels: list[Tensor]) -> Tensor:
        """Returns the number (1,) of positive anchors. ``gt_labels`` are (R,) for each image."""
        return self.find_positives(gt_labels).sum().float()[None]

    def find_positives(self, gt_labels: list[Tensor]) -> Tensor:
        """Returns a mask (N, R) of positive anchors. ``gt_labels`` are (R,) for each image."""
        labels = torch.stack(gt_labels)  # -1 is ignored, K is background
        return (labels >= 0) & (labels != self.num_classes)

    def preprocess_image(self, batched_inputs: list[dict[str, Any]]) -> ImageList:
        """Normalizes and pads the images. Inputs with "features" become ``CachedImages``."""
        cached = find_cached_images(batched_inputs, self.backbone.size_divisibility, self.device)
        if cached is not None:
            return cached
        return super().preprocess_image(batched_inputs)

    def _ema_update(self, *args: Any, **kwargs: Any) -> float:
        # Detectron2's ``losses`` divides by this value. Here, ``forward`` divides instead.
        return 1.0

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        # Checkpoints of Detectron2's class do not contain the running mean, which then stays as is.
        state_dict.setdefault(f"{prefix}loss_normalizer", self.loss_normalizer)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
