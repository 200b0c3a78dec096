# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Selects the images to label next, and finds labels that are probably wrong."""

from .inspection import inspect_labels, shortlist
from .labels import LabelSuspect, SuspectFile, apply_corrections, read_suspects
from .selection import Selection, select
from .sheet import (
    SUSPECT_FILES,
    check_selection_folder,
    draw_image,
    draw_suspect,
    write_selection,
    write_suspects,
)
from .simulation import simulate

__all__ = [
    "SUSPECT_FILES",
    "LabelSuspect",
    "Selection",
    "SuspectFile",
    "apply_corrections",
    "check_selection_folder",
    "draw_image",
    "draw_suspect",
    "inspect_labels",
    "read_suspects",
    "select",
    "shortlist",
    "simulate",
    "write_selection",
    "write_suspects",
]
