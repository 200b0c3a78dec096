# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The tasks of models: detection, classification and pre-training.

A ``Task`` has everything in which runs of different tasks differ: the training data, the mappers,
the loaders, the evaluator, the default recipe, and the config keys of the image size.
``INPUT.DATASET_MAPPER_NAME`` determines the task of a config.
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
"""All tasks. ``find_task_of_data`` returns the first task that a source fits."""


def find_task(cfg: CfgNode) -> Task:
    """Returns the task of a config, which its mapper determines; detection if it is unknown."""
    for task in TASKS:
        if cfg.INPUT.DATASET_MAPPER_NAME in task.mappers:
            return task
    return DETECTION


def find_task_of_data(source: Source) -> Task:
    """Returns the task that uses most of a source's labels.

    It is detection if there are boxes, classification if there are class folders, and else
    pre-training, which every source fits.
    """
    return next(task for task in TASKS if task.fits(source))
