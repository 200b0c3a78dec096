# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Trained models as files for other runtimes: writing them, checking them, running them."""

from .agreement import ExportReport
from .api import export_backbone, export_model
from .formats import ExportInfo
from .runtime import (
    EXPORTED_SUFFIXES,
    ExportedModel,
    ExportedPredictor,
    SharedEncoderModel,
    build_exported_scorer,
)
from .shared_encoder import export_shared_encoder

__all__ = [
    "EXPORTED_SUFFIXES", "ExportInfo", "ExportReport", "ExportedModel", "ExportedPredictor",
    "SharedEncoderModel", "build_exported_scorer", "export_backbone", "export_model",
    "export_shared_encoder",
]  # fmt: skip
