# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Classifiers on the features of a Mobile-Former backbone."""

from .linear_decoder import LinearDecoder
from .transformer_decoder import TransformerDecoder

__all__ = ["LinearDecoder", "TransformerDecoder"]
