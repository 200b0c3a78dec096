# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Training, evaluation and prediction on Detectron2's engine."""

from .data_flags import add_data_flags, add_image_flags
from .eval_only import evaluate
from .launch import run_distributed
from .run_record import write_run_record
from .setup import build_config, setup
from .trainer import Trainer

__all__ = [
    "Trainer",
    "add_data_flags",
    "add_image_flags",
    "build_config",
    "evaluate",
    "run_distributed",
    "setup",
    "write_run_record",
]
