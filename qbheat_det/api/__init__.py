# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Trained models in Python, see docs/python.md: ``load``, and what it returns."""

from .batch import Job, run_batch
from .detector import Detector, Encoder
from .files import predict_files
from .loading import load
from .results import Detections, save_annotations

__all__ = [
    "Detections", "Detector", "Encoder", "Job", "load", "predict_files", "run_batch",
    "save_annotations",
]  # fmt: skip
