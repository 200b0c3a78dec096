# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Trained models in Python, see docs/python.md: ``load``, and what it returns."""

from .detector import Detector, Encoder
from .files import predict_files
from .loading import load
from .results import Detections, save_annotations

__all__ = ["Detections", "Detector", "Encoder", "load", "predict_files", "save_annotations"]
