# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Pre-training objectives; importing this package registers them."""

from .distillation import FeatureDistillation
from .heat_predictor import HeatPredictor
from .moco import MoCo
from .pixel_decoder import ReconstructionDecoder, patchify, take, unpatchify
from .qb_heat import CORNERS, QUADRANTS, QUADRANTS_OF, QBHeat, VisibleQuarters, visible_positions
from .random_masking import InterpolatedMasking, MaskTokenMasking
from .reconstruction import ReconstructionLoss, ReconstructionModel
from .wasserstein import WassersteinDependency

__all__ = [
    "CORNERS", "QUADRANTS", "QUADRANTS_OF", "FeatureDistillation", "HeatPredictor",
    "InterpolatedMasking", "MaskTokenMasking", "MoCo", "QBHeat", "ReconstructionDecoder",
    "ReconstructionLoss", "ReconstructionModel", "VisibleQuarters", "WassersteinDependency",
    "patchify", "take", "unpatchify", "visible_positions",
]  # fmt: skip
