# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Selects the images to label next, and finds labels that are probably wrong."""

from .inspection import inspect_labels, shortlist
from .labels import apply_corrections
from .selection import Selection, select
from .sheet import (
    SUSPECT_FILES,
    check_selection_folder,
    draw_image,
    write_selection,
    write_suspects,
)
from .simulation import simulate

__all__ = [
    "SUSPECT_FILES",
    "Selection",
    "apply_corrections",
    "check_selection_folder",
    "draw_image",
    "inspect_labels",
    "select",
    "shortlist",
    "simulate",
    "write_selection",
    "write_suspects",
]
