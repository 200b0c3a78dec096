# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Training, evaluation and prediction on Detectron2's engine."""

from .launch import run_distributed
from .resume import record_start
from .run_flags import RunFlags
from .setup import build_config, setup
from .trainer import Trainer, evaluate, start_run, train_afresh

__all__ = [
    "RunFlags", "Trainer", "build_config", "evaluate", "record_start", "run_distributed", "setup",
    "start_run", "train_afresh",
]  # fmt: skip
