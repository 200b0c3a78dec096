# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Detectron2's RetinaNet with losses normalised over all processes.

Detectron2 divides both losses by a running mean of the number of positive anchors, kept by each
process for its own images and lost on resume. Gradients then depend on how a batch is spread
over processes, which a test on two processes shows. Here the running mean is of all processes
together and part of the state. All else is Detectron2's, parameter names included.
"""

from typing import Any

import torch
from detectron2.config import configurable
from detectron2.modeling import META_ARCH_REGISTRY
from detectron2.modeling.meta_arch import RetinaNet
from detectron2.utils import comm
from torch import Tensor


@META_ARCH_REGISTRY.register()
class SyncRetinaNet(RetinaNet):
    """RetinaNet whose processes give the gradients of one process with the joined batch.

    In one process it is Detectron2's ``RetinaNet``. Where a step is cut into micro-batches, the
    running mean is that of micro-batches: it moves once for each of them, not once a step.
    """

    normalizes_losses = True
    """Says that the mean of the processes' losses is the loss, however uneven their shares."""

    @configurable
    def __init__(self, **kwargs: Any) -> None:
        """
        Args:
            kwargs: as for ``RetinaNet``.
        """
        super().__init__(**kwargs)
        # Detectron2's name and first value.
        self.register_buffer("loss_normalizer", torch.tensor(100.0))
        self.loss_normalizer: Tensor
        self._num_positives = torch.tensor(0.0)

    def losses(
        self,
        anchors: Any,
        pred_logits: list[Tensor],
        gt_labels: list[Tensor],
        pred_anchor_deltas: list[Tensor],
        gt_boxes: list[Tensor],
    ) -> dict[str, Tensor]:
        """As in ``RetinaNet``, which asks ``_ema_update`` for what it divides by."""
        labels = torch.stack(gt_labels)
        total = ((labels >= 0) & (labels != self.num_classes)).sum().float()
        if comm.get_world_size() > 1:
            torch.distributed.all_reduce(total)
        self._num_positives = total
        return super().losses(anchors, pred_logits, gt_labels, pred_anchor_deltas, gt_boxes)

    def _ema_update(
        self, name: str, value: float, initial_value: float, momentum: float = 0.9
    ) -> Tensor:
        # ``value`` cannot be summed over processes: it is 1 where there are no positives at all.
        total = self._num_positives.clamp(min=1)
        self.loss_normalizer.mul_(momentum).add_(total, alpha=1 - momentum)
        return self.loss_normalizer / comm.get_world_size()

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        # Weights of Detectron2's RetinaNet are complete without the running mean.
        state_dict.setdefault(f"{prefix}loss_normalizer", self.loss_normalizer)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
