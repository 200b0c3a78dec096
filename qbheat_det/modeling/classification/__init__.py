# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Classifiers for any backbone. Importing this package registers them with Detectron2."""

from .image_classifier import ImageClassifier, LinearDecoder, TransformerDecoder
from .timm_mobile_former import TIMM_NAMES, TimmMobileFormer

__all__ = [
    "TIMM_NAMES", "ImageClassifier", "LinearDecoder", "TimmMobileFormer", "TransformerDecoder",
]  # fmt: skip
