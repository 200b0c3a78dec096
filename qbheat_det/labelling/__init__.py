# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Few boxes, many images: selects images to label next, and finds labels that are wrong."""

from .selection import Selection, select
from .sheet import write_selection
from .simulation import simulate

__all__ = ["Selection", "select", "simulate", "write_selection"]
