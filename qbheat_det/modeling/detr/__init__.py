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
from .denoising import Denoising
from .matcher import HungarianMatcher, Targets
from .mf_decoder import MFDecoder
from .query_groups import QueryGroups
from .training_help import TrainingHelp

__all__ = [
    "ClassificationLoss",
    "DecoderWidths",
    "Denoising",
    "FocalSettings",
    "HungarianMatcher",
    "MFDecoder",
    "QueryGroups",
    "SetCriterion",
    "SoftmaxClassification",
    "Targets",
    "TrainingHelp",
    "build_classification",
]
