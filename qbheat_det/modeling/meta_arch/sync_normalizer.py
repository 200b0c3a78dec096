# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Losses of Detectron2's dense detectors, normalised over all processes.

Detectron2 divides the losses of RetinaNet and of FCOS by a running mean of the number of positive
anchors, kept by each process for its own images and lost on resume. Gradients then depend on how a
batch is spread over processes, which a test on two processes shows. Here the running mean is of
all processes together, moves once a step, and is part of the state.
"""

import math
from typing import Any

import torch
from detectron2.modeling.meta_arch.dense_detector import DenseDetector
from detectron2.structures import ImageList
from detectron2.utils import comm
from torch import Tensor

from qbheat_det.layers.cached_images import find_cached_images


class SyncNormalizer(DenseDetector):
    """What stands before one of Detectron2's dense detectors in the bases of a class.

    The detector has an ``anchor_generator``, ``label_anchors`` and ``num_classes``, and asks
    ``_ema_update`` in its losses for what it divides by. Parameter names are the detector's.
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
        self._normalizers: Tensor | None = None

    def forward(
        self, batched_inputs: list[dict[str, Any]], normalizers: Tensor | None = None
    ) -> Any:
        """As in the detector.

        Args:
            batched_inputs: as there.
            normalizers: in training, what ``loss_normalizers`` gave for the effective batch; of
                the processes of this call if None.
        """
        self._normalizers = normalizers
        return super().forward(batched_inputs)

    def preprocess_image(self, batched_inputs: list[dict[str, Any]]) -> ImageList:
        """As in the detector; entries with "features" become a ``CachedImages``."""
        divisibility = self.backbone.size_divisibility
        cached = find_cached_images(batched_inputs, divisibility, self.device)
        return super().preprocess_image(batched_inputs) if cached is None else cached

    def loss_counts(self, batched_inputs: list[dict[str, Any]]) -> Tensor:
        """Returns (1,): the positive anchors of a batch, by labelling alone."""
        height, width = self.preprocess_image(batched_inputs).tensor.shape[-2:]
        maps = [
            torch.empty(0, math.ceil(height / stride), math.ceil(width / stride))
            for stride in self.anchor_generator.strides
        ]
        truth = [entry["instances"].to(self.device) for entry in batched_inputs]
        labels, _ = self.label_anchors(self.anchor_generator(maps), truth)
        return self._count_positives(labels)

    def loss_normalizers(self, counts: Tensor, parts: int) -> Tensor:
        """Moves the running mean on by one step; returns (1,), what each part divides by.

        Args:
            counts: (1,), the positive anchors of the effective batch.
            parts: how many parts it is cut into.
        """
        momentum = 0.9  # Detectron2's
        self.loss_normalizer.mul_(momentum).add_(counts[0].clamp(min=1), alpha=1 - momentum)
        return self.loss_normalizer[None] / parts

    def losses(
        self, anchors: Any, pred_logits: list[Tensor], gt_labels: list[Tensor], *others: Any
    ) -> dict[str, Tensor]:
        """As in the detector, which asks ``_ema_update`` for what it divides by."""
        if self._normalizers is None:
            total = self._count_positives(gt_labels)
            if comm.get_world_size() > 1:
                torch.distributed.all_reduce(total)
            self._normalizers = self.loss_normalizers(total, comm.get_world_size())
        return super().losses(anchors, pred_logits, gt_labels, *others)

    def _count_positives(self, gt_labels: list[Tensor]) -> Tensor:
        labels = torch.stack(gt_labels)  # (N, R): -1 where ignored, K where background
        return ((labels >= 0) & (labels != self.num_classes)).sum().float()[None]

    def _ema_update(self, *args: Any, **kwargs: Any) -> Tensor:
        assert self._normalizers is not None
        return self._normalizers[0]

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        # Weights of Detectron2's own class are complete without the running mean.
        state_dict.setdefault(f"{prefix}loss_normalizer", self.loss_normalizer)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
