# Copyright (c) qbheat_det contributors. Apache-2.0.
"""MF-DETR: the detector, its decoder, and its matching and loss."""

from .criterion import SetCriterion
from .mf_decoder import MFDecoder
from .mf_detr import MFDETR

__all__ = ["MFDETR", "MFDecoder", "SetCriterion"]
