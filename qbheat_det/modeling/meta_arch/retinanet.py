# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Detectron2's RetinaNet with losses normalised over all processes; see ``sync_normalizer.py``.

Paper: "Focal Loss for Dense Object Detection", arXiv:1708.02002. All else is Detectron2's,
parameter names included.
"""

from typing import Any

from detectron2.config import configurable
from detectron2.modeling import META_ARCH_REGISTRY
from detectron2.modeling.meta_arch import RetinaNet

from .sync_normalizer import SyncNormalizer


@META_ARCH_REGISTRY.register()
class SyncRetinaNet(SyncNormalizer, RetinaNet):
    """RetinaNet with the gradients of the effective batch, however it is cut into parts.

    Parts are the shares of processes and the micro-batches of each. In one process that takes a
    batch whole it is Detectron2's ``RetinaNet``.
    """

    first_normalizer = 100.0

    @configurable
    def __init__(self, **kwargs: Any) -> None:
        """
        Args:
            kwargs: as for ``RetinaNet``.
        """
        super().__init__(**kwargs)
