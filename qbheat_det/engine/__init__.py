# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Training, evaluation and prediction on Detectron2's engine."""

from .launch import run_distributed
from .resume import write_run_record
from .run_flags import RunFlags
from .setup import build_config, setup
from .trainer import Trainer, evaluate

__all__ = [
    "RunFlags", "Trainer", "build_config", "evaluate", "run_distributed", "setup",
    "write_run_record",
]  # fmt: skip
