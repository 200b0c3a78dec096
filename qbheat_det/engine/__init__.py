# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Training and evaluation on Detectron2's engine: ``assemble_run``, ``setup`` and ``Trainer``."""

from .launch import run_distributed
from .run import Stage, assemble_evaluation, assemble_run
from .run_config import read_config
from .run_flags import RunFlags
from .run_record import record_start
from .setup import setup
from .trainer import Trainer, evaluate

__all__ = [
    "RunFlags",
    "Stage",
    "Trainer",
    "assemble_evaluation",
    "assemble_run",
    "evaluate",
    "read_config",
    "record_start",
    "run_distributed",
    "setup",
]
