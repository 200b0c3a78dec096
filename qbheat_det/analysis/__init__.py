# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Figures of trained models, and comparisons of runs."""

from collections.abc import Callable

from .figures import Figure

__all__ = ["load_figures"]


def load_figures() -> dict[str, Callable[..., Figure]]:
    """Returns a dict from the name of each figure to the function that draws it.

    Each function takes a list of ``Run`` and a ``FigureOptions``. Some have keyword arguments.
    """
    # Imported here, because matplotlib takes a second to import.
    from . import attention, beyond, curves, detections, pretraining, spectrum

    return {
        "attention": attention.draw_attention,
        "beyond": beyond.draw_beyond,
        "classes": detections.draw_classes,
        "correlation": pretraining.draw_correlation,
        "curves": curves.draw_curves,
        "detections": detections.draw_detections,
        "reconstructions": pretraining.draw_reconstructions,
        "spectrum": spectrum.draw_spectrum,
    }
