# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Comparisons of pre-training objectives: the commands, their execution, and tables."""

from .execute import compare, is_done
from .objectives import load_objectives
from .plan import DETECTORS, Comparison, list_jobs

__all__ = ["DETECTORS", "Comparison", "compare", "is_done", "list_jobs", "load_objectives"]
