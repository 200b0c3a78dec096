# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Pre-training objectives. Importing this package registers them with Detectron2."""

from .base import PretrainingModel
from .distillation import FeatureDistillation
from .moco import MoCo
from .qb_heat import (
    QUADRANTS,
    QUADRANTS_OF,
    HeatPredictor,
    QBHeat,
    VisibleQuarters,
    visible_positions,
)
from .random_masking import InterpolatedMasking, MaskTokenMasking
from .reconstruction import (
    ReconstructionDecoder,
    ReconstructionLoss,
    ReconstructionModel,
    patchify,
    take,
)
from .wasserstein import WassersteinDependency

__all__ = [
    "QUADRANTS",
    "QUADRANTS_OF",
    "FeatureDistillation",
    "HeatPredictor",
    "InterpolatedMasking",
    "MaskTokenMasking",
    "MoCo",
    "PretrainingModel",
    "QBHeat",
    "ReconstructionDecoder",
    "ReconstructionLoss",
    "ReconstructionModel",
    "VisibleQuarters",
    "WassersteinDependency",
    "patchify",
    "take",
    "visible_positions",
]
