# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Trained weights by name."""

from .index import Figure, Fingerprint, OutputPrint, ZooEntry, find_entry, list_entries, load_index

__all__ = [
    "Figure",
    "Fingerprint",
    "OutputPrint",
    "ZooEntry",
    "find_entry",
    "list_entries",
    "load_index",
]
