# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Comparisons of objectives: planned, run in processes of their own, gone on with, reported."""

from .compare import compare, render_plan
from .objectives import load_objectives
from .plan import DETECTORS, Comparison

__all__ = ["DETECTORS", "Comparison", "compare", "load_objectives", "render_plan"]
