# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Classifiers on any backbone; importing this package registers them."""

from .decoders import LinearDecoder, TransformerDecoder
from .image_classifier import ImageClassifier
from .mixing import BatchMixing
from .timm_mobile_former import TIMM_NAMES, TimmMobileFormer

__all__ = [
    "TIMM_NAMES",
    "BatchMixing",
    "ImageClassifier",
    "LinearDecoder",
    "TimmMobileFormer",
    "TransformerDecoder",
]
