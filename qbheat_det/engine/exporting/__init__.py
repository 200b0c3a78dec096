# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Models as files for other runtimes: what stands in them, that they agree, and running them."""

from .export_info import ExportInfo
from .exported_model import EXPORTED_SUFFIXES, ExportedModel, to_instances

__all__ = ["EXPORTED_SUFFIXES", "ExportInfo", "ExportedModel", "to_instances"]
