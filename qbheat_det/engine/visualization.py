# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The hook that draws figures during training.

``import qbheat_det.analysis`` registers the drawing functions in
``qbheat_det.core.figures.TRAINING_FIGURES``.
"""

import logging
import math
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path

import cv2
import numpy as np
from detectron2.config import CfgNode
from detectron2.engine import HookBase
from detectron2.utils import comm
from torch import nn

from qbheat_det.core.figures import TRAINING_FIGURES, Figure, NotApplicable, write_figure
from qbheat_det.core.seeding import undisturbed
from qbheat_det.modeling.contracts import PretrainingObjective

from .data_sources import load_fixed_images
from .hooks import TrainingRun, is_due

logger = logging.getLogger(__name__)
_PER_RUN = 10  # drawings of each figure if VIS.PERIOD is 0
DrawFigure = Callable[[nn.Module], Figure]


class VisualizationHook(HookBase):
    """Draws figures before the first step, periodically, and after the last step.

    Figures are written to ``OUTPUT_DIR/visualizations``, with the number of steps in the name, and
    to TensorBoard. The hook does not change weights, image order or dropout. It logs errors instead
    of raising them. Only the main process draws, and all other processes wait in their next step.
    """

    trainer: TrainingRun

    def __init__(self, figures: Mapping[str, DrawFigure], *, period: int) -> None:
        """
        Args:
            figures: drawing functions by name; called with the model in eval mode, without
                gradients.
            period: steps between drawings; 0 means a tenth of the run.
        """
        self._figures = dict(figures)
        self._period = period
        self._failed: set[str] = set()

    def before_train(self) -> None:
        """Draws all figures before the first step; does nothing in a resumed run."""
        if self.trainer.start_iter == 0:
            self._draw_all(steps=0)

    def after_step(self) -> None:
        """Draws all figures if they are due."""
        period = self._period or math.ceil(self.trainer.max_iter / _PER_RUN)
        if is_due(self.trainer, period):
            self._draw_all(steps=self.trainer.iter + 1)

    def _draw_all(self, *, steps: int) -> None:
        model = self.trainer.evaluated_model
        for name in list(self._figures) if comm.is_main_process() else ():
            try:
                with undisturbed(model):
                    self._publish(self._figures[name](model), steps)
            except NotApplicable:
                del self._figures[name]
            except Exception:
                if name not in self._failed:
                    message = f"Figure '{name}' failed after {steps:,} steps; training goes on"
                    logger.exception(message)
                self._failed.add(name)

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


def build_visualization_hook(cfg: CfgNode, model: nn.Module) -> VisualizationHook | None:
    """Returns a hook for the figures of pre-training, or None if ``VIS.ENABLED`` is off."""
    if not (cfg.VIS.ENABLED and isinstance(model, PretrainingObjective)):
        return None
    load_images = cache(partial(load_fixed_images, cfg))
    figures = {
        name: partial(draw, load_images=load_images, cfg=cfg)
        for name, draw in TRAINING_FIGURES.items()
    }
    return VisualizationHook(figures, period=cfg.VIS.PERIOD)
