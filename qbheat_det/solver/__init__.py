# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Optimizers, and schedules in epochs for Detectron2's learning-rate schedulers."""

from .optimizer import build_optimizer, layers_above, parameter_groups
from .schedule import (
    MovableLR,
    build_lr_scheduler,
    count_epochs,
    describe_schedule,
    resolve_schedule,
)

__all__ = [
    "MovableLR",
    "build_lr_scheduler",
    "build_optimizer",
    "count_epochs",
    "describe_schedule",
    "layers_above",
    "parameter_groups",
    "resolve_schedule",
]
