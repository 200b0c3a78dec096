# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Parts of MF-DETR: decoder, matching, loss."""

from .classification_losses import (
    ClassificationLoss,
    FocalSettings,
    SoftmaxClassification,
    build_classification,
)
from .criterion import SetCriterion
from .decoder_block import DecoderWidths
from .matcher import HungarianMatcher, Targets
from .mf_decoder import MFDecoder

__all__ = [
    "ClassificationLoss",
    "DecoderWidths",
    "FocalSettings",
    "HungarianMatcher",
    "MFDecoder",
    "SetCriterion",
    "SoftmaxClassification",
    "Targets",
    "build_classification",
]
