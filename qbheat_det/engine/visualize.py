# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Draws figures of the model during training, within a share of the run's time.

``import qbheat_det.analysis`` registers the drawing functions in
``qbheat_det.core.figures.TRAINING_FIGURES``.
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
_PER_RUN = 20  # drawings of each figure if VIS.PERIOD is 0
DrawFigure = Callable[[nn.Module], Figure]


class VisualizationHook(HookBase):
    """Draws figures before the first step, periodically, and after the last step.

    Figures go to ``OUTPUT_DIR/visualizations``, with the number of steps in the name, and to
    TensorBoard. A periodic drawing is skipped if it and the final one would exceed the figure's
    share of the run's time. The hook changes no weights, no order of images and no dropout, and
    logs errors instead of raising them. Only the main process draws; the others wait for it in
    their next step.

    Attributes:
        costs: by figure, the seconds of all drawings and of the last drawing.
    """

    trainer: TrainingRun

    def __init__(self, figures: Mapping[str, DrawFigure], *, period: int, share: float) -> None:
        """
        Args:
            figures: drawing functions by name, which get the model in eval mode without gradients.
            period: steps between drawings; 0 for a twentieth of the run.
            share: maximum part of the run's time for each figure.
        """
        self._figures = dict(figures)
        self._period = period
        self._share = share
        self._started = perf_counter()
        self._earlier_seconds = 0.0  # before the run was resumed
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
        """Draws all figures of a new run."""
        self._started = perf_counter()
        if comm.is_main_process() and self.trainer.start_iter == 0:
            for name in list(self._figures):
                self._draw(name, steps=0)

    def after_step(self) -> None:
        """Draws the figures that are due and within their share of time."""
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
        """Logs the time that figures took, after an error as well."""
        if self.costs and comm.is_main_process():
            each = ", ".join(f"{name} {seconds:.1f}" for name, (seconds, _) in self.costs.items())
            logger.info(f"Of {self._run_seconds():.1f} seconds, figures took: {each}")

    def _draw(self, name: str, steps: int) -> None:
        model = self.trainer.evaluated_model
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # do not count pending steps
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
    """Returns a hook for the config's figures and nearest-neighbour score; None if it has none.

    Raises:
        UserError: a key of ``VIS`` is out of range, or the model has no backbone to score.
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
