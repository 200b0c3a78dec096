# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Figures of the model while it trains, within a share of the run's time.

The functions that draw them are registered in ``qbheat_det.core.figures.TRAINING_FIGURES`` by
``import qbheat_det.analysis``.
"""

import logging
import math
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from time import perf_counter
from typing import Any

import cv2
import numpy as np
import torch
from detectron2.config import CfgNode
from detectron2.engine import HookBase
from detectron2.utils import comm
from torch import nn

from qbheat_det.core.errors import UserError
from qbheat_det.core.figures import TRAINING_FIGURES, Figure, NotApplicable, write_figure
from qbheat_det.core.seeding import undisturbed
from qbheat_det.modeling.contracts import PretrainingObjective

from .data_sources import load_fixed_images
from .evaluation import NeighbourScorer, scores_neighbours
from .hooks import TrainingRun

logger = logging.getLogger(__name__)
_PER_RUN = 20  # drawings of each figure where no period is given
DrawFigure = Callable[[nn.Module], Figure]


class VisualizationHook(HookBase):
    """Draws figures before the first step, periodically, and after the last step.

    They go to ``OUTPUT_DIR/visualizations``, named by the number of steps, and to TensorBoard. A
    drawing in between is skipped if it and the last one would exceed the figure's share of the
    run's time. Weights, the order of images and dropout are the same without the hook; an error is
    logged, not raised. Only the main process draws; the others wait for it in their next step.

    Attributes:
        costs: seconds by figure, of all its drawings and of the last.
    """

    trainer: TrainingRun

    def __init__(self, figures: Mapping[str, DrawFigure], *, period: int, share: float) -> None:
        """Takes functions by name, which get the model in eval mode, without gradients.

        ``period`` 0 is a twentieth of the run; ``share`` is the part of its time that each may
        take.
        """
        self._figures = dict(figures)
        self._period = period
        self._share = share
        self._started = perf_counter()
        self._earlier_seconds = 0.0  # of the run before it was resumed
        self._failed: set[str] = set()
        self.costs = dict.fromkeys(figures, (0.0, 0.0))

    def state_dict(self) -> dict[str, Any]:
        """Returns the seconds of the run and of each figure."""
        return {"run_seconds": self._run_seconds(), "costs": dict(self.costs)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores ``state_dict``."""
        self._started = perf_counter()
        self._earlier_seconds = state_dict["run_seconds"]
        for name in self.costs.keys() & state_dict["costs"].keys():
            self.costs[name] = tuple(state_dict["costs"][name])

    def before_train(self) -> None:
        """Draws all figures of a run that begins."""
        self._started = perf_counter()
        if comm.is_main_process() and self.trainer.start_iter == 0:
            for name in list(self._figures):
                self._draw(name, steps=0)

    def after_step(self) -> None:
        """Draws the figures that are due and have time left."""
        steps, end = self.trainer.iter + 1, self.trainer.max_iter
        period = self._period or math.ceil(end / _PER_RUN)
        if not comm.is_main_process() or (steps < end and steps % period):
            return
        for name in list(self._figures):
            seconds, last = self.costs[name]
            planned = seconds + 2 * last  # this drawing and the one after the last step
            if steps == end or planned <= self._share * self._run_seconds():
                self._draw(name, steps)

    def after_train(self) -> None:
        """Logs what the figures have cost, also if the run ends with an error."""
        if self.costs and comm.is_main_process():
            each = ", ".join(f"{name} {seconds:.1f}" for name, (seconds, _) in self.costs.items())
            logger.info(f"Of {self._run_seconds():.1f} seconds, figures took: {each}")

    def _draw(self, name: str, steps: int) -> None:
        model = self.trainer.evaluated_model
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the steps under way are no cost of the figure
        started = perf_counter()
        try:
            with undisturbed(model):
                self._publish(self._figures[name](model), steps)
        except NotApplicable:
            del self._figures[name], self.costs[name]
            return
        except Exception:
            if name not in self._failed:
                logger.exception(f"Figure '{name}' failed after {steps:,} steps; training goes on")
            self._failed.add(name)
        took = perf_counter() - started
        self.costs[name] = self.costs[name][0] + took, took

    def _publish(self, figure: Figure, steps: int) -> None:
        storage = self.trainer.storage
        folder = Path(self.trainer.cfg.OUTPUT_DIR) / "visualizations"
        write_figure(figure, folder, suffix=f"_{steps:07d}")
        finite = {name: float(x) for name, x in figure.scalars.items() if math.isfinite(x)}
        storage.put_scalars(smoothing_hint=False, **finite)
        for name, image in figure.images.items():
            pixels = cv2.imdecode(np.frombuffer(image.content, np.uint8), cv2.IMREAD_COLOR)
            if pixels is not None:  # SVG is not decoded
                storage.put_image(f"{figure.name}/{name}", pixels[..., ::-1].transpose(2, 0, 1))

    def _run_seconds(self) -> float:
        return self._earlier_seconds + perf_counter() - self._started


def build_visualization_hook(cfg: CfgNode, model: nn.Module) -> VisualizationHook | None:
    """Returns a hook for the figures and the nearest-neighbour score that a config asks for.

    Raises a ``UserError`` if a key of ``VIS`` is out of range, or the model has no backbone to
    score.
    """
    keys = cfg.VIS
    if not (0 <= keys.SHARE <= 1 and keys.NUM_IMAGES >= 1):
        raise UserError("VIS.SHARE must be in [0, 1] and VIS.NUM_IMAGES at least 1")
    figures: dict[str, DrawFigure] = {}
    if keys.ENABLED and isinstance(model, PretrainingObjective):
        load_images = cache(partial(load_fixed_images, cfg))
        for name, draw in TRAINING_FIGURES.items():
            figures[name] = partial(draw, load_images=load_images, cfg=cfg)
    if scores_neighbours(cfg):
        figures["knn"] = NeighbourScorer(cfg, model).draw
    hook = VisualizationHook(figures, period=keys.PERIOD, share=keys.SHARE)
    return hook if figures else None
