# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Training on unlabelled images with a mean teacher, the moving average of the weights.

The model first trains on labelled images only (burn-in). Then the mean teacher predicts on weak
views of unlabelled images, and the model learns these predictions on strong views. A checkpoint
contains the mean teacher. The iteration determines the position in the stream of unlabelled images,
so runs resume exactly.
"""

import itertools
import logging
from collections.abc import Sequence
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.engine import HookBase
from torch import nn

from qbheat_det.modeling.contracts import (
    PSEUDO_LABELS,
    UNLABELLED,
    BatchedInputs,
    SupportsUnlabelled,
)

from .hooks import EvalHook, TrainingRun

logger = logging.getLogger(__name__)
_MIN_SCORE = 0.5  # of the boxes that ``count_boxes`` counts


class MeanTeacher:
    """Adds its predictions, with key ``PSEUDO_LABELS``, to the dicts of unlabelled images."""

    def __init__(self, model: nn.Module, *, precision: torch.dtype | None) -> None:
        """
        Args:
            model: the moving average, in eval mode.
            precision: dtype of autocast; None disables autocast.
        """
        assert isinstance(model, SupportsUnlabelled)
        self._average: Any = model
        self._precision = precision
        self._last_images: BatchedInputs = []  # unlabelled images of the last micro-batch

    def __call__(self, batches: Sequence[BatchedInputs]) -> None:
        """Adds pseudo labels to the unlabelled images in the micro-batches of a step."""
        unlabelled_batches: list[BatchedInputs] = []
        for batch in batches:
            images: BatchedInputs = []
            for labelled_image in batch:
                images += labelled_image.get(UNLABELLED, ())
            unlabelled_batches.append(images)
        self._last_images = unlabelled_batches[-1]
        if not self._last_images:  # during the burn-in
            return
        device = next(self._average.parameters()).device.type
        with torch.autocast(device, dtype=self._precision, enabled=self._precision is not None):
            labels = self._average.pseudo_labels(unlabelled_batches)
        for image, label in zip(itertools.chain(*unlabelled_batches), labels, strict=True):
            image[PSEUDO_LABELS] = label

    @torch.no_grad()
    def count_boxes(self) -> float | None:
        """Returns the mean number of predicted boxes per unlabelled image.

        Runs inference on the unlabelled images of the last micro-batch, and counts boxes with a
        score of at least 0.5. Returns None if there are no such images.
        """
        if not self._last_images:
            return None
        outputs = self._average(self._last_images)
        scores = torch.cat([output["instances"].scores for output in outputs])
        return float((scores >= _MIN_SCORE).sum()) / len(outputs)


def build_eval_hooks(
    cfg: CfgNode, mean_teacher: MeanTeacher | None, *, burn_in: int
) -> list[HookBase]:
    """Returns the hooks that evaluate a run.

    Args:
        cfg: config of the run.
        mean_teacher: the mean teacher of a run with unlabelled images, else None.
        burn_in: number of steps on labelled images only.
    """
    period = cfg.TEST.EVAL_PERIOD
    metric = cfg.TEST.BEST_METRIC
    patience = cfg.TEST.PATIENCE
    if mean_teacher is None:
        return [EvalHook(period=period, best_metric=metric, patience=patience)]
    return [
        PseudoBoxes(mean_teacher, period=cfg.SOLVER.LOG_PERIOD),
        SemiSupervisedEvalHook(
            burn_in=burn_in, period=period, best_metric=metric, patience=patience
        ),
    ]


class PseudoBoxes(HookBase):
    """Logs the result of ``MeanTeacher.count_boxes`` as ``pseudo_boxes``."""

    trainer: TrainingRun

    def __init__(self, mean_teacher: MeanTeacher, *, period: int) -> None:
        """``period`` is the number of iterations between two values in the log."""
        self._mean_teacher = mean_teacher
        self._period = period

    def after_step(self) -> None:
        if (self.trainer.iter + 1) % self._period:
            return
        count = self._mean_teacher.count_boxes()
        if count is not None:
            self.trainer.storage.put_scalar("pseudo_boxes", count, smoothing_hint=False)


class SemiSupervisedEvalHook(EvalHook):
    """``EvalHook`` that also evaluates at the end of the burn-in.

    It warns about each later evaluation whose result is worse than at the end of the burn-in. The
    patience of ``EvalHook`` begins there too.
    """

    def __init__(self, *, burn_in: int, **settings: Any) -> None:
        """
        Args:
            burn_in: number of steps on labelled images only.
            settings: arguments of ``EvalHook``.
        """
        super().__init__(**settings)
        self._burn_in = burn_in
        self._value_after_burn_in: float | None = None

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of ``EvalHook`` and the value at the end of the burn-in."""
        return {**super().state_dict(), "supervised": self._value_after_burn_in}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._value_after_burn_in = state_dict["supervised"]

    def is_due(self) -> bool:
        """Whether an evaluation is due after this step."""
        ends_burn_in = self.trainer.iter + 1 == self._burn_in
        return super().is_due() or ends_burn_in

    def count_to_best(self) -> int:
        """Returns the number of iterations until the best evaluation, at least the burn-in."""
        return max(self._burn_in, super().count_to_best())

    def _evaluate(self) -> None:
        super()._evaluate()
        if self.value is None or self.trainer.iter + 1 < self._burn_in:
            return
        if self._value_after_burn_in is None:
            self._value_after_burn_in = self.value
        elif self.sign * self.value < self.sign * self._value_after_burn_in:
            logger.warning(
                f"Unlabelled images make the model worse: {self._best_metric} is {self.value:.4g} "
                f"but was {self._value_after_burn_in:.4g} after the burn-in, so lower "
                "MODEL.SEMI.WEIGHT, or train without --unlabelled"
            )
