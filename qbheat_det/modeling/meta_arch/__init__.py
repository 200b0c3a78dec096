# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Meta-architectures; importing this package registers them."""

from .fcos import SyncFCOS
from .image_classifier import ImageClassifier
from .mf_detr import MFDETR
from .moco import MoCo
from .qb_heat import QBHeat
from .retinanet import SyncRetinaNet
from .scattered_masking import InterpolatedMasking, MaskTokenMasking
from .wasserstein_dependency import WassersteinDependency

__all__ = [
    "MFDETR",
    "ImageClassifier",
    "InterpolatedMasking",
    "MaskTokenMasking",
    "MoCo",
    "QBHeat",
    "SyncFCOS",
    "SyncRetinaNet",
    "WassersteinDependency",
]
