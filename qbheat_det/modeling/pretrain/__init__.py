# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Parts of pre-training objectives."""

from .heat_predictor import DIRECTIONS, HeatPredictor, LinearModels, extend
from .reconstruction_decoder import ReconstructionDecoder, patchify, unpatchify
from .reconstruction_loss import ReconstructionLoss
from .visible_quarter import CORNERS, PLACES, PLACES_OF, VisibleQuarters, visible_positions

__all__ = [
    "CORNERS",
    "DIRECTIONS",
    "PLACES",
    "PLACES_OF",
    "HeatPredictor",
    "LinearModels",
    "ReconstructionDecoder",
    "ReconstructionLoss",
    "VisibleQuarters",
    "extend",
    "patchify",
    "unpatchify",
    "visible_positions",
]
