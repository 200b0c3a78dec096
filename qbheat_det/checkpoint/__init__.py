# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Reading weights without running what is hidden in a file."""

from .checkpointer import ExactCheckpointer, SafeCheckpointer, check_weights_file

__all__ = ["ExactCheckpointer", "SafeCheckpointer", "check_weights_file"]
