# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Losses of Detectron2's dense detectors, normalised over all processes.

Detectron2 divides the losses of RetinaNet and FCOS by a running mean of the number of positive
anchors, which each process keeps for its own images and loses on resume. Gradients then depend on
the number of processes. Here the running mean is of all processes together, is updated once a step,
and is a buffer in checkpoints.
"""

import math
from typing import Any

import torch
from detectron2.modeling.meta_arch.dense_detector import DenseDetector
from detectron2.structures import ImageList
from detectron2.utils import comm
from torch import Tensor

from qbheat_det.layers.cached_images import find_cached_images

_COUNT = "num_positives"  # key that ``losses`` adds to the losses


class SyncNormalizer(DenseDetector):
    """Base class in front of a detector with ``anchor_generator``, ``label_anchors``, ``losses``.

    Parameter names are the detector's.
    """

    first_normalizer: float
    """Detectron2's first value of the running mean."""

    def __init__(self, **kwargs: Any) -> None:
        """
        Args:
            kwargs: as for the detector.
        """
        super().__init__(**kwargs)
        # Detectron2's name.
        self.register_buffer("loss_normalizer", torch.tensor(self.first_normalizer))
        self.loss_normalizer: Tensor

    def forward(
        self, batched_inputs: list[dict[str, Any]], normalizers: Tensor | None = None
    ) -> Any:
        """As in the detector.

        Args:
            batched_inputs: dicts of a dataset mapper.
            normalizers: in training, the result of ``loss_normalizers`` for the effective batch;
                by default for the batches of all processes in this call.
        """
        outputs = super().forward(batched_inputs)
        if not self.training:
            return outputs
        count = outputs.pop(_COUNT)
        if normalizers is None:
            if comm.get_world_size() > 1:
                torch.distributed.all_reduce(count)
            normalizers = self.loss_normalizers(count, comm.get_world_size())
        return {name: total / normalizers[0] for name, total in outputs.items()}

    def preprocess_image(self, batched_inputs: list[dict[str, Any]]) -> ImageList:
        """As in the detector; entries with "features" become a ``CachedImages``."""
        divisibility = self.backbone.size_divisibility
        cached = find_cached_images(batched_inputs, divisibility, self.device)
        return super().preprocess_image(batched_inputs) if cached is None else cached

    def loss_counts(self, batched_inputs: list[dict[str, Any]]) -> Tensor:
        """Returns (1,): the number of positive anchors of a batch, without the backbone."""
        height, width = self.preprocess_image(batched_inputs).tensor.shape[-2:]
        maps = [
            torch.empty(0, math.ceil(height / stride), math.ceil(width / stride))
            for stride in self.anchor_generator.strides
        ]
        truth = [entry["instances"].to(self.device) for entry in batched_inputs]
        labels, _ = self.label_anchors(self.anchor_generator(maps), truth)
        return self._count_positives(labels)

    def loss_normalizers(self, counts: Tensor, parts: int) -> Tensor:
        """Updates the running mean; returns (1,), the divisor of each part's losses.

        Args:
            counts: (1,), the positive anchors of the effective batch.
            parts: number of parts that it is cut into.
        """
        momentum = 0.9  # Detectron2's
        self.loss_normalizer.mul_(momentum).add_(counts[0].clamp(min=1), alpha=1 - momentum)
        return self.loss_normalizer[None] / parts

    def losses(
        self, anchors: Any, pred_logits: list[Tensor], gt_labels: list[Tensor], *others: Any
    ) -> dict[str, Tensor]:
        """Returns the detector's losses before division, and the number of positive anchors."""
        sums = super().losses(anchors, pred_logits, gt_labels, *others)
        return {**sums, _COUNT: self._count_positives(gt_labels)}

    def _count_positives(self, gt_labels: list[Tensor]) -> Tensor:
        labels = torch.stack(gt_labels)  # (N, R): -1 where ignored, K where background
        return ((labels >= 0) & (labels != self.num_classes)).sum().float()[None]

    def _ema_update(self, *args: Any, **kwargs: Any) -> float:
        return 1.0  # what the detector divides its losses by

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        # Weights of Detectron2's own class are complete without the running mean.
        state_dict.setdefault(f"{prefix}loss_normalizer", self.loss_normalizer)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
