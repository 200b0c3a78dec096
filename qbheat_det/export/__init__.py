# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Exports trained models as ONNX files, and compares their results with PyTorch."""

from .agreement import ExportReport
from .files import export_backbone, export_model
from .shared_encoder import export_shared_encoder

__all__ = ["ExportReport", "export_backbone", "export_model", "export_shared_encoder"]
