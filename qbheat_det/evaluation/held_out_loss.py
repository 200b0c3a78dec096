# Copyright (c) qbheat_det contributors. Apache-2.0.
"""The loss of pre-training models on images that they were not trained on."""

import itertools
import math
import statistics
from typing import Any

import torch
from detectron2.evaluation import DatasetEvaluator
from detectron2.utils import comm

from qbheat_det.core.errors import UserError


class HeldOutLossEvaluator(DatasetEvaluator):
    """Averages the per-image loss of a pre-training model over a dataset.

    If the model returns "loss_reconstruction", the results are ``{"reconstruction": {"loss_corner",
    "loss_centre", "loss", "loss_standard_error"}}``. The first two are the means over corner views
    and over center views, if there are any. "loss" is the mean over images, where the loss of an
    image is the mean over its views. With "loss_feature", the outer key is "feature".
    """

    def __init__(self, dataset_name: str) -> None:
        self._dataset_name = dataset_name
        self._name = "reconstruction"
        self._losses: list[tuple[str, str, float]] = []  # image, view, loss

    def reset(self) -> None:
        self._losses = []

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
        for entry, output, loss in zip(inputs, outputs, losses, strict=True):
            view = output.get("place", "")
            if view not in ("", "centre"):
                view = "corner"
            image = str(entry.get("image_id", entry.get("file_name")))
            self._losses.append((image, view, loss))

    def evaluate(self) -> dict[str, dict[str, float]]:
        """Gathers all losses. Returns results on the main process, and ``{}`` on others."""
        parts = comm.gather(self._losses, dst=0)
        if not comm.is_main_process():
            return {}
        # Sorted, so that results are bit-identical to those of one process.
        losses = sorted(itertools.chain.from_iterable(parts))
        results = {}
        for kind in ("corner", "centre"):
            losses_of_view = [loss for _, view, loss in losses if view == kind]
            if losses_of_view:
                results[f"loss_{kind}"] = statistics.fmean(losses_of_view)
        image_losses = [
            statistics.fmean(loss for _, _, loss in views)
            for _, views in itertools.groupby(losses, key=lambda entry: entry[0])
        ]
        mean = math.nan
        error = math.nan
        if image_losses:
            mean = statistics.fmean(image_losses)
        if len(image_losses) > 1 and math.isfinite(mean):
            error = statistics.stdev(image_losses, xbar=mean) / math.sqrt(len(image_losses))
        return {self._name: {**results, "loss": mean, "loss_standard_error": error}}
