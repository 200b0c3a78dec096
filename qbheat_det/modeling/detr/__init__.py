# Copyright (c) qbheat_det contributors. Apache-2.0.
"""MF-DETR: registered detector, decoder, matching, loss."""

from .auxiliary_queries import AuxiliaryQueries, QueryGroups
from .criterion import HungarianMatcher, SetCriterion, Targets
from .decoder_block import DecoderWidths
from .denoising import Denoising
from .losses import (
    ClassificationLoss,
    FocalSettings,
    SoftmaxClassification,
    build_classification,
)
from .mf_decoder import MFDecoder
from .mf_detr import MFDETR

__all__ = [
    "MFDETR",
    "AuxiliaryQueries",
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
    "build_classification",
]
