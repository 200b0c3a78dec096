# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Trained models as files for other runtimes: writing them, checking them, running them."""

from .agreement import ExportReport
from .api import export_backbone, export_model
from .shared_encoder import export_shared_encoder

__all__ = ["ExportReport", "export_backbone", "export_model", "export_shared_encoder"]
