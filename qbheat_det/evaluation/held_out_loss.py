# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Evaluates pre-training models by their loss on images that they were not trained on."""

import itertools
import math
import statistics
from typing import Any

import torch
from detectron2.evaluation import DatasetEvaluator
from detectron2.utils import comm

from qbheat_det.core.errors import UserError

from .baselines import ReconstructionBaselines


class HeldOutLossEvaluator(DatasetEvaluator):
    """Averages the per-image loss of a pre-training model over a dataset.

    The model must return one loss for each image, such as "loss_reconstruction". Results are then
    ``{"reconstruction": {"loss_corner", "loss_centre", "loss", "loss_standard_error"}}``.

    - "loss_corner" and "loss_centre" are the means over corner views and over center views. If
      there are no such views, the key is missing.
    - "loss" is the mean over images. The loss of an image is the mean over its views.
    - "loss_standard_error" is the standard error of "loss".
    - "zero", "mean" and "ridge" are the losses of predictors without a network, see
      ``ReconstructionBaselines``. If the model does not reconstruct patches, the keys are missing.
    """

    def __init__(self, dataset_name: str) -> None:
        self._dataset_name = dataset_name
        self._name = "reconstruction"  # of the loss; ``process`` sets it
        self._losses: list[tuple[str, str, float]] = []  # image, view, loss
        self._baselines = ReconstructionBaselines()

    def reset(self) -> None:
        self._losses = []
        self._baselines.reset()

    def process(self, inputs: list[dict[str, Any]], outputs: list[dict[str, Any]]) -> None:
        """Adds a batch. Raises a ``UserError`` if the model returns no loss."""
        names = {name for output in outputs for name in output if name.startswith("loss_")}
        if len(names) != 1:
            raise UserError(
                f"dataset '{self._dataset_name}' has no annotations, which the model needs: only "
                "pre-training can be evaluated without annotations"
            )
        (name,) = names
        self._name = name.removeprefix("loss_")
        losses = torch.stack([output[name] for output in outputs]).double().tolist()
        images = [str(entry.get("image_id", entry.get("file_name"))) for entry in inputs]
        self._baselines.process(images, outputs)
        for image, output, loss in zip(images, outputs, losses, strict=True):
            view = output.get("place", "")  # position of the visible quarter, or ""
            if view not in ("", "centre"):
                view = "corner"  # for the evaluation, all four corners are alike
            self._losses.append((image, view, loss))

    def evaluate(self) -> dict[str, dict[str, float]]:
        """Gathers all losses. Returns results on the main process, and ``{}`` on others."""
        parts = comm.gather(self._losses, dst=0)
        baselines = self._baselines.evaluate()
        if not comm.is_main_process():
            return {}
        # Sorted, so that results are bit-identical to those of one process.
        losses = sorted(itertools.chain.from_iterable(parts))
        results = {}
        for wanted_view in ("corner", "centre"):
            view_losses = [loss for _, view, loss in losses if view == wanted_view]
            if view_losses:
                results[f"loss_{wanted_view}"] = statistics.fmean(view_losses)
        image_losses = []  # mean over the views of each image
        for _, image_entries in itertools.groupby(losses, key=lambda entry: entry[0]):
            image_losses.append(statistics.fmean(loss for _, _, loss in image_entries))
        mean = math.nan
        error = math.nan
        if image_losses:
            mean = statistics.fmean(image_losses)
        if len(image_losses) > 1 and math.isfinite(mean):
            error = statistics.stdev(image_losses, xbar=mean) / math.sqrt(len(image_losses))
        results |= {"loss": mean, "loss_standard_error": error, **baselines}
        return {self._name: results}
