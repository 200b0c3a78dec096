# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Optimizers; schedules are Detectron2's."""

from .optimizer import build_optimizer, parameter_groups

__all__ = ["build_optimizer", "parameter_groups"]
