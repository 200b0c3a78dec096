# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Parts of pre-training objectives."""

from .heat_predictor import DIRECTIONS, HeatPredictor, LinearModels, extend
from .hidden_features import InterpolatedFeatures, MaskToken
from .pretraining_model import PretrainingModel, find_map
from .reconstruction_decoder import ReconstructionDecoder, patchify, unpatchify
from .reconstruction_loss import ReconstructionLoss
from .reconstruction_model import Reconstruction, ReconstructionModel, mean_loss
from .scattered_mask import ScatteredMask
from .visible_quarter import CORNERS, PLACES, PLACES_OF, VisibleQuarters, visible_positions

__all__ = [
    "CORNERS",
    "DIRECTIONS",
    "PLACES",
    "PLACES_OF",
    "HeatPredictor",
    "InterpolatedFeatures",
    "LinearModels",
    "MaskToken",
    "PretrainingModel",
    "Reconstruction",
    "ReconstructionDecoder",
    "ReconstructionLoss",
    "ReconstructionModel",
    "ScatteredMask",
    "VisibleQuarters",
    "extend",
    "find_map",
    "mean_loss",
    "patchify",
    "unpatchify",
    "visible_positions",
]
