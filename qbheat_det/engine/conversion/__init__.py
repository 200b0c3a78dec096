# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Others' files of weights for the package's encoders, and the package's for timm."""

from .convert import Conversion, convert_weights
from .targets import RESNETS, Target, find_target

__all__ = ["RESNETS", "Conversion", "Target", "convert_weights", "find_target"]
