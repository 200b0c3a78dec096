# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Pre-training objectives; importing this package registers them."""

from .base import PretrainingModel, ProjectionHead, find_map
from .distillation import FeatureDistillation
from .heat_predictor import DIRECTIONS, HeatPredictor, LinearModels, extend
from .moco import FeatureQueue, MoCo
from .pixel_decoder import ReconstructionDecoder, patchify, take, unpatchify
from .qb_heat import CORNERS, QUADRANTS, QUADRANTS_OF, QBHeat, VisibleQuarters, visible_positions
from .random_masking import (
    InterpolatedFeatures,
    InterpolatedMasking,
    MaskToken,
    MaskTokenMasking,
    RandomMask,
    RandomMasking,
)
from .reconstruction import ReconstructionLoss, ReconstructionModel
from .wasserstein import DependencyLoss, LipschitzCritic, WassersteinDependency

__all__ = [
    "CORNERS",
    "DIRECTIONS",
    "QUADRANTS",
    "QUADRANTS_OF",
    "DependencyLoss",
    "FeatureDistillation",
    "FeatureQueue",
    "HeatPredictor",
    "InterpolatedFeatures",
    "InterpolatedMasking",
    "LinearModels",
    "LipschitzCritic",
    "MaskToken",
    "MaskTokenMasking",
    "MoCo",
    "PretrainingModel",
    "ProjectionHead",
    "QBHeat",
    "RandomMask",
    "RandomMasking",
    "ReconstructionDecoder",
    "ReconstructionLoss",
    "ReconstructionModel",
    "VisibleQuarters",
    "WassersteinDependency",
    "extend",
    "find_map",
    "patchify",
    "take",
    "unpatchify",
    "visible_positions",
]
