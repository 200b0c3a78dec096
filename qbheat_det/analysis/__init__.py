# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Figures of trained models, the cost of a model, and comparisons of runs."""

from collections.abc import Callable

from qbheat_det.core.figures import FIGURES, Figure

__all__ = ["load_figures"]


def load_figures() -> dict[str, Callable[..., Figure]]:
    """Imports all modules that register figures, and returns ``FIGURES``."""
    from . import (  # noqa: F401  imported here, because matplotlib takes a second to import
        attention,
        curves,
        detections,
        pretraining,
        spectrum,
    )

    return FIGURES
