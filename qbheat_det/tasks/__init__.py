# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The tasks of models: detection, classification and pre-training.

A ``Task`` owns everything by which the runs of one kind differ from those of another: which data
they learn from, the mappers, the loaders, the evaluator, the default recipe and the config keys of
the image size. ``INPUT.DATASET_MAPPER_NAME`` determines the task of a config, see ``find_task``.
"""

from detectron2.config import CfgNode

from qbheat_det.data import Source

from .base import Task
from .classification import Classification
from .detection import Detection
from .pretraining import Pretraining

__all__ = [
    "CLASSIFICATION",
    "DETECTION",
    "PRETRAINING",
    "TASKS",
    "Task",
    "find_task",
    "find_task_of_data",
]

DETECTION = Detection()
CLASSIFICATION = Classification()
PRETRAINING = Pretraining()
TASKS: tuple[Task, ...] = (DETECTION, CLASSIFICATION, PRETRAINING)
"""All tasks. ``find_task_of_data`` takes the first one that fits."""


def find_task(cfg: CfgNode) -> Task:
    """Returns the task that has the mapper of a config. Unknown mappers are those of detectors."""
    for task in TASKS:
        if cfg.INPUT.DATASET_MAPPER_NAME in task.mappers:
            return task
    return DETECTION


def find_task_of_data(source: Source) -> Task:
    """Returns the task that learns most from a source: from its boxes, its classes, its images."""
    return next(task for task in TASKS if task.fits(source))
