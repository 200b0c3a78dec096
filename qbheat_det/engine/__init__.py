# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Training, evaluation and prediction on Detectron2's engine."""

from .setup import add_data_flags, build_config, check_gpus, setup
from .trainer import Trainer, evaluate

__all__ = ["Trainer", "add_data_flags", "build_config", "check_gpus", "evaluate", "setup"]
