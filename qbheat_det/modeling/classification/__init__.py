# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Classifiers on any backbone; importing this package registers them."""

from .batch_mixing import BatchMixing
from .image_classifier import ImageClassifier
from .linear_decoder import LinearDecoder
from .timm_mobile_former import TimmMobileFormer
from .timm_models import TIMM_NAMES, add_timm_weights
from .transformer_decoder import TransformerDecoder

__all__ = [
    "TIMM_NAMES",
    "BatchMixing",
    "ImageClassifier",
    "LinearDecoder",
    "TimmMobileFormer",
    "TransformerDecoder",
    "add_timm_weights",
]
