# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Trained models in Python, see docs/python.md: ``load``, and what it returns."""

from qbheat_det.inference.batch import Job, run_batch
from qbheat_det.inference.files import predict_files
from qbheat_det.inference.results import Detections, save_annotations

from .detector import Detector
from .encoder import Encoder
from .loading import load

__all__ = [
    "Detections", "Detector", "Encoder", "Job", "load", "predict_files", "run_batch",
    "save_annotations",
]  # fmt: skip
