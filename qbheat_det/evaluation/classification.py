# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Accuracy of a classifier over images and over classes, and its confusion matrix."""

import itertools
import json
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from detectron2.evaluation import DatasetEvaluator
from detectron2.utils import comm
from torch import Tensor

from qbheat_det.core.errors import UserError

logger = logging.getLogger(__name__)
Counts = npt.NDArray[np.int64]
_SHOWN = 5  # classes and confusions in the log


@dataclass(frozen=True)
class TopAccuracy:
    """Shares of images in per cent, with the standard errors of binomial counts; nan without any.

    Attributes:
        top1: images whose true class comes first.
        top5: images whose true class is among the first five.
        top1_standard_error: of ``top1``.
        top5_standard_error: of ``top5``.
        num_images: how many were classified.
    """

    top1: float
    top5: float
    top1_standard_error: float
    top5_standard_error: float
    num_images: int

    @classmethod
    def from_ranks(cls, ranks: Tensor) -> "TopAccuracy":
        """Counts the ranks (N,) of the true classes, 0 for the first."""
        num_images = len(ranks)
        shares = [int((ranks < top).sum()) / max(1, num_images) for top in (1, 5)]
        errors = [math.sqrt(share * (1 - share) / max(1, num_images)) for share in shares]
        scale = 100.0 if num_images else math.nan
        top1, top5, error1, error5 = (scale * value for value in (*shares, *errors))
        return cls(top1, top5, error1, error5, num_images)

    def to_dict(self) -> dict[str, float]:
        """Returns all but the number of images, by name."""
        values = vars(self).items()
        return {name: value for name, value in values if name != "num_images"}


class ClassificationEvaluator(DatasetEvaluator):
    """Top-1, top-5 and balanced accuracy: the mean over the classes that have images.

    Results are ``{"classification": {"top1", "top5", "balanced", and each with
    "_standard_error"}}`` in per cent, nan without images. Of equal scores the first class counts as
    the highest, and an image with a score of nan as wrong.

    ``classification.json`` in ``output_dir`` adds the accuracy of each class and the confusions.
    Results do not depend on the number of processes.

    Attributes:
        confusion: after ``evaluate``, on the main process: (K, K), images of class i that were
            classified as class j; images with nan are in none.
    """

    confusion: Counts

    def __init__(
        self, dataset_name: str, *, class_names: Sequence[str], output_dir: str | None = None
    ) -> None:
        self._dataset_name = dataset_name
        self.class_names = tuple(class_names)
        self.output_dir = output_dir
        self.confusion = np.zeros((len(class_names),) * 2, dtype=np.int64)
        self._seen: list[tuple[int, int, int, int]] = []  # image, label, prediction, rank

    def reset(self) -> None:
        """Forgets all images."""
        self._seen = []

    def process(self, inputs: list[dict[str, Any]], outputs: list[dict[str, Any]]) -> None:
        """Takes a batch in.

        Args:
            inputs: "image_id" and "label".
            outputs: "scores" (K,), the higher the likelier.

        Raises:
            UserError: the model gives no scores of these classes.
        """
        if any("scores" not in output for output in outputs):
            raise UserError(
                f"dataset '{self._dataset_name}' has class labels, but the model gives no 'scores':"
                " MODEL.META_ARCHITECTURE must be a classifier"
            )
        if not outputs:
            return
        scores = torch.stack([output["scores"] for output in outputs])
        if scores.shape[1] != len(self.class_names):
            raise UserError(
                f"the model gives scores of {scores.shape[1]} classes, but MODEL.CLASS_NAMES has "
                f"{len(self.class_names)}"
            )
        labels = [entry["label"] for entry in inputs]
        truth = torch.tensor(labels, device=scores.device)
        found = torch.stack([predict(scores), rank_true_class(scores, truth)], dim=1).tolist()
        for entry, label, (prediction, rank) in zip(inputs, labels, found, strict=True):
            self._seen.append((entry["image_id"], label, prediction, rank))

    def evaluate(self) -> dict[str, dict[str, float]]:
        """Gathers the images of all processes; empty results but on the main one."""
        parts = comm.gather(self._seen, dst=0)
        if not comm.is_main_process():
            return {}
        by_image = {entry[0]: entry[1:] for entry in itertools.chain.from_iterable(parts)}
        # (N, 3), in the order of the set.
        rows = np.array([by_image[image] for image in sorted(by_image)], dtype=np.int64)
        labels, predictions, ranks = rows.reshape(-1, 3).T
        num_classes = len(self.class_names)
        known = predictions >= 0
        flat = np.bincount(
            labels[known] * num_classes + predictions[known], minlength=num_classes**2
        )
        self.confusion = flat.reshape(num_classes, num_classes)
        totals = np.bincount(labels, minlength=num_classes)
        results = _summarise(ranks, self.confusion.diagonal(), totals)
        self._report(results, totals)
        return {"classification": results}

    def _report(self, results: dict[str, float], totals: Counts) -> None:
        confused = find_confusions(self.confusion)
        names = self.class_names
        shares = {
            name: 100 * int(right) / int(total)
            for name, right, total in zip(names, self.confusion.diagonal(), totals, strict=True)
            if total
        }
        hardest = sorted(shares, key=shares.__getitem__)[:_SHOWN]
        parts = [f"'{names[i]}' as '{names[j]}' {n} times" for i, j, n in confused[:_SHOWN]]
        logger.info(
            f"'{self._dataset_name}': top-1 {results['top1']:.2f} +- "
            f"{results['top1_standard_error']:.2f} %, top-5 {results['top5']:.2f}, balanced "
            f"{results['balanced']:.2f} of {int(totals.sum()):,} images. "
            f"Hardest classes: {', '.join(f'{name} {shares[name]:.1f}' for name in hardest)}. "
            f"Most confused: {'; '.join(parts) or 'none'}"
        )
        if not self.output_dir:
            return
        content = {
            "dataset": self._dataset_name,
            "num_images": int(totals.sum()),
            **{key: value if math.isfinite(value) else None for key, value in results.items()},
            "classes": [
                {"name": name, "images": int(total), "top1": shares.get(name)}
                for name, total in zip(names, totals, strict=True)
            ],
            "confusions": [
                {"class": names[i], "taken_for": names[j], "images": n} for i, j, n in confused
            ],
        }
        folder = Path(self.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(content, indent=1, allow_nan=False)
        (folder / "classification.json").write_text(text + "\n", encoding="utf-8")


def predict(scores: Tensor) -> Tensor:
    """From scores (N, K) to the first class with the highest, (N,); -1 where one is nan."""
    # argmax leaves open which of equal ones it takes.
    first = (scores == scores.amax(dim=1, keepdim=True)).int().argmax(dim=1)
    return torch.where(scores.isnan().any(dim=1), -1, first)


def rank_true_class(scores: Tensor, labels: Tensor) -> Tensor:
    """Returns (N,), how many classes come before the true one; more than K where a score is nan.

    Of classes with equal scores the lower label comes first.

    Args:
        scores: (N, K).
        labels: (N,).
    """
    own = scores.gather(1, labels[:, None])
    lower = torch.arange(scores.shape[1], device=scores.device) < labels[:, None]
    before = ((scores > own) | ((scores == own) & lower)).sum(dim=1)
    return torch.where(scores.isnan().any(dim=1), scores.shape[1] + 5, before)


def find_confusions(confusion: Counts) -> list[tuple[int, int, int]]:
    """Returns true class, other class and number of images, the most frequent confusion first.

    Args:
        confusion: (K, K), images of class i that were taken for class j.
    """
    wrong = confusion.copy()
    np.fill_diagonal(wrong, 0)
    pairs = np.argwhere(wrong)
    order = np.argsort(-wrong[tuple(pairs.T)], kind="stable")
    return [(int(i), int(j), int(wrong[i, j])) for i, j in pairs[order]]


def _summarise(ranks: Counts, right: Counts, totals: Counts) -> dict[str, float]:
    """From ranks (N,), and correct and all images of each class (K,), to the results."""
    has_images = totals > 0
    shares = right[has_images] / totals[has_images]
    errors = np.sqrt(shares * (1 - shares) / totals[has_images])
    count = len(shares)
    return {
        **TopAccuracy.from_ranks(torch.as_tensor(ranks)).to_dict(),
        "balanced": 100 * float(shares.mean()) if count else math.nan,
        "balanced_standard_error": (
            100 * float(np.sqrt((errors**2).sum())) / count if count else math.nan
        ),
    }
