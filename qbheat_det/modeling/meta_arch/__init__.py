# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Meta-architectures; importing this package registers them."""

from .mf_detr import MFDETR
from .retinanet import SyncRetinaNet

__all__ = ["MFDETR", "SyncRetinaNet"]
