# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Hooks of the trainer."""

from .checkpoints import MovingAverage, PeriodicCheckpointer, build_average
from .evaluation import EvalHook, average_batch_statistics
from .knn import NeighbourScorer, check_neighbours, scores_neighbours
from .monitors import DataTimeMonitor, MemoryMonitor
from .skipped_images import SkippedImages
from .training_run import TrainingRun
from .visualize import VISUALIZATIONS_DIR, VisualizationHook, build_visualization_hook, undisturbed

__all__ = [
    "VISUALIZATIONS_DIR",
    "DataTimeMonitor",
    "EvalHook",
    "MemoryMonitor",
    "MovingAverage",
    "NeighbourScorer",
    "PeriodicCheckpointer",
    "SkippedImages",
    "TrainingRun",
    "VisualizationHook",
    "average_batch_statistics",
    "build_average",
    "build_visualization_hook",
    "check_neighbours",
    "scores_neighbours",
    "undisturbed",
]
