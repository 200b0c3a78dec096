# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What a model costs, what it has learned, and how runs compare: the figures of the paper."""

from collections.abc import Callable
from importlib import import_module

from qbheat_det.core.figures import FIGURES, Figure

__all__ = ["load_figures"]

_MODULES = (
    "attention",
    "confusion_matrix",
    "correlation",
    "curves",
    "detections",
    "probes",
    "reconstruction",
    "spectrum",
)


def load_figures() -> dict[str, Callable[..., Figure]]:
    """Imports all modules that draw figures, which registers them, and returns ``FIGURES``."""
    for module in _MODULES:
        import_module(f"{__name__}.{module}")
    return FIGURES
