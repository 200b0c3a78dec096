# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Hooks that monitor the model during training: figures, and token similarity.

``import qbheat_det.analysis`` registers the drawing functions in
``qbheat_det.core.figures.TRAINING_FIGURES``.
"""

import logging
import math
from collections import Counter
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
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

from qbheat_det.core.figures import TRAINING_FIGURES, Figure, NotApplicable, write_figure
from qbheat_det.core.seeding import undisturbed
from qbheat_det.modeling.contracts import (
    PretrainingObjective,
    SupportsTokenBlocks,
    get_backbone,
    get_encoder,
    get_token_parameters,
)

from .data_sources import load_fixed_images
from .evaluation import NeighbourScorer, scores_neighbours
from .hooks import TrainingRun, is_due

logger = logging.getLogger(__name__)
COLLAPSED = 0.995
"""Tokens count as collapsed if their mean cosine similarity over images exceeds this value."""
_READINGS = 5  # consecutive collapsed readings after the warm-up that trigger the warning
_PER_RUN = 20  # drawings of each figure if VIS.PERIOD is 0
DrawFigure = Callable[[nn.Module], Figure]


class VisualizationHook(HookBase):
    """Draws figures before the first step, periodically, and after the last step.

    Figures are written to ``OUTPUT_DIR/visualizations``, with the number of steps in the name, and
    to TensorBoard. A periodic drawing is skipped if this drawing and the final one would exceed the
    figure's share of the run's time. The hook does not change weights, image order or dropout. It
    logs errors instead of raising them. Only the main process draws, and all other processes wait
    in their next step.

    Attributes:
        costs: maps each figure to the seconds of all its drawings and of its last drawing.
    """

    trainer: TrainingRun

    def __init__(self, figures: Mapping[str, DrawFigure], *, period: int, share: float) -> None:
        """
        Args:
            figures: drawing functions by name; called with the model in eval mode, without
                gradients.
            period: steps between drawings; 0 means a twentieth of the run.
            share: maximum share of the run's time that each figure may take.
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
        """Draws all figures before the first step; does nothing in a resumed run."""
        self._started = perf_counter()
        if comm.is_main_process() and self.trainer.start_iter == 0:
            for name in list(self._figures):
                self._draw(name, steps=0)

    def after_step(self) -> None:
        """Draws the figures that are due and do not exceed their share of the time."""
        steps, end = self.trainer.iter + 1, self.trainer.max_iter
        period = self._period or math.ceil(end / _PER_RUN)
        if not (comm.is_main_process() and is_due(self.trainer, period)):
            return
        for name in list(self._figures):
            seconds, last = self.costs[name]
            planned = seconds + 2 * last  # this drawing and the one after the last step
            if steps == end or planned <= self._share * self._run_seconds():
                self._draw(name, steps)

    def after_train(self) -> None:
        """Logs the time that each figure took, also if training failed."""
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
    """Returns a hook for figures and the nearest-neighbour score; None if both are disabled.

    Raises:
        UserError: the config asks for a score, but the model accepts images of several sizes.
    """
    keys = cfg.VIS
    figures: dict[str, DrawFigure] = {}
    if keys.ENABLED and isinstance(model, PretrainingObjective):
        load_images = cache(partial(load_fixed_images, cfg))
        for name, draw in TRAINING_FIGURES.items():
            figures[name] = partial(draw, load_images=load_images, cfg=cfg)
    if scores_neighbours(cfg):
        figures["knn"] = NeighbourScorer(cfg, model).draw
    hook = VisualizationHook(figures, period=keys.PERIOD, share=keys.SHARE)
    return hook if figures else None


class TokenMonitor(HookBase):
    """Logs the mean cosine similarity of each block's tokens, and warns once if most collapse.

    The tokens of a Mobile-Former can collapse to the same vectors for all images. The loss still
    decreases, but the tokens then contain no information about the image.

    "cosine_over_images/<block>" compares the same token across the images of a micro-batch, and
    "cosine_over_tokens/<block>" compares the tokens of the same image. Forward hooks are present
    only in steps that are logged.
    """

    trainer: TrainingRun

    def __init__(self, blocks: Mapping[str, nn.Module], *, period: int, warmup: int) -> None:
        """
        Args:
            blocks: blocks by name, each returning a feature map and tokens (N, M, D).
            period: iterations between two readings, at least 1.
            warmup: number of iterations at the start in which collapse is ignored.
        """
        self._blocks = blocks
        self._period = period
        self._warmup = warmup
        self._handles: list[RemovableHandle] = []
        self._read: dict[str, Tensor] = {}
        self._collapsed = Counter[str]()  # consecutive readings, by block
        self._has_warned = False

    def before_step(self) -> None:
        """Adds forward hooks to the blocks if a reading is due."""
        if is_due(self.trainer, self._period):
            for name, block in self._blocks.items():
                self._handles.append(block.register_forward_hook(partial(self._keep, name)))

    def after_step(self) -> None:
        """Logs the readings and removes the forward hooks."""
        self.after_train()
        if not self._read:
            return
        values = torch.stack([*self._read.values()]).tolist()
        names, self._read = list(self._read), {}
        for name, pair in zip(names, values, strict=True):
            for kind, value in zip(("images", "tokens"), pair, strict=True):
                if math.isfinite(value):  # NaN for a single image or token
                    scalar = f"cosine_over_{kind}/{name}"
                    self.trainer.storage.put_scalar(scalar, value, smoothing_hint=False)
            if self.trainer.iter >= self._warmup:
                is_same = pair[0] > COLLAPSED
                self._collapsed[name] = self._collapsed[name] + 1 if is_same else 0
        names = [name for name, count in self._collapsed.items() if count >= _READINGS]
        # Tokens of the first blocks depend little on the image in any network.
        if 2 * len(names) > len(self._blocks) and not self._has_warned:
            self._has_warned = True
            now = self.trainer.cfg.SOLVER.TOKEN_MULTIPLIER
            logger.warning(
                f"The tokens of {len(names)} of {len(self._blocks)} blocks have become the same "
                f"for all images (cosine above {COLLAPSED}; first in '{names[0]}'): a lower "
                f"SOLVER.TOKEN_MULTIPLIER than {now:g}, such as {now / 10:g}, can keep them apart"
            )

    def after_train(self) -> None:
        """Removes the forward hooks; an error in a step would leave them."""
        while self._handles:
            self._handles.pop().remove()

    def _keep(
        self, name: str, block: nn.Module, inputs: Any, output: tuple[Tensor, Tensor]
    ) -> None:
        # Only the first micro-batch of a step is measured.
        if block.training and name not in self._read:
            self._read[name] = mean_cosines(output[1].detach())


@torch.no_grad()
def mean_cosines(tokens: Tensor) -> Tensor:
    """Returns the mean cosine similarity over pairs of images and over pairs of tokens, (2,).

    A mean is NaN if there is only one image or token.

    Args:
        tokens: (N, M, D).
    """
    directions = F.normalize(tokens.float(), dim=2)
    means = []
    for dim in (0, 1):
        # The squared norm of a sum of n unit vectors is n plus the cosines of all ordered pairs.
        count = directions.shape[dim]
        lengths = directions.sum(dim=dim).square().sum(dim=-1)
        pairs = count * (count - 1)
        means.append((lengths.mean() - count) / pairs if pairs else lengths.new_tensor(math.nan))
    return torch.stack(means)


def build_token_monitor(cfg: CfgNode, model: nn.Module) -> TokenMonitor | None:
    """Returns a monitor if ``SOLVER.LOG_TOKENS`` is set and tokens are trained, else None."""
    backbone = get_backbone(model)
    if backbone is None or not cfg.SOLVER.LOG_TOKENS:
        return None
    encoder = get_encoder(backbone)
    trained = any(parameter.requires_grad for parameter in get_token_parameters(encoder))
    if not (trained and isinstance(encoder, SupportsTokenBlocks)):
        return None
    return TokenMonitor(
        encoder.token_blocks(), period=cfg.SOLVER.LOG_PERIOD, warmup=cfg.SOLVER.WARMUP_ITERS
    )
