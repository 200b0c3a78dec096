# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Accuracy of classifiers and of weighted nearest neighbors (kNN).

kNN follows "Unsupervised Feature Learning via Non-Parametric Instance Discrimination",
arXiv:1805.01978. The k most similar training images vote, each with the weight
exp(cosine similarity / temperature).
"""

import itertools
import json
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from detectron2.evaluation import DatasetEvaluator
from detectron2.utils import comm
from torch import Tensor
from torch.nn import functional as F

from qbheat_det.core.errors import UserError
from qbheat_det.core.files import write_atomically
from qbheat_det.core.text import join_first

logger = logging.getLogger(__name__)
Counts = npt.NDArray[np.int64]
_TOP = {"top1": 1, "top5": 5}
_NUM_LOGGED = 5  # number of classes in the log
_TINY = torch.finfo(torch.float64).tiny
_MIN_VOTE = 1e-300  # keeps the votes of distant neighbors above zero
_CHUNK = 2**24  # number of similarities computed at a time (128 MB)


def measure_ranks(ranks: Tensor) -> dict[str, float]:
    """Returns "top1", "top5" and their binomial standard errors (suffix "_standard_error").

    Values are in percent, or nan if there are no images. ``ranks`` (N,) are the zero-based ranks of
    the true classes.
    """
    accuracies: dict[str, float] = {}
    errors: dict[str, float] = {}
    for key, top in _TOP.items():
        share = math.nan
        error = math.nan
        if len(ranks):
            share = int((ranks < top).sum()) / len(ranks)
            error = math.sqrt(share * (1 - share) / len(ranks))
        accuracies[key] = 100.0 * share
        errors[f"{key}_standard_error"] = 100.0 * error
    return {**accuracies, **errors}


class ClassificationEvaluator(DatasetEvaluator):
    """Top-1, top-5 and balanced accuracy (the mean over all classes that have images).

    Results are ``{"classification": {"top1", "top5", "balanced"}}``. The standard error of "top1"
    has the key "top1_standard_error", and so on. All values are in percent, or nan if there are no
    images. Among equal scores, the first class wins. An image with a nan score is counted as wrong.
    ``classification.json`` in ``output_dir`` also has the accuracy of each class and the
    confusions. On the main process, ``confusion[i, j]`` is the number of images of class i that
    ``evaluate`` found to be classified as class j.
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
        self._seen = []

    def process(self, inputs: list[dict[str, Any]], outputs: list[dict[str, Any]]) -> None:
        """Adds a batch. Inputs have "image_id" and "label", and outputs have "scores" (K,)."""
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
        results = torch.stack([predict(scores), rank_true_class(scores, truth)], dim=1).tolist()
        for entry, label, (prediction, rank) in zip(inputs, labels, results, strict=True):
            self._seen.append((entry["image_id"], label, prediction, rank))

    def evaluate(self) -> dict[str, dict[str, float]]:
        """Gathers all ranks. Returns results on the main process, and ``{}`` on others."""
        parts = comm.gather(self._seen, dst=0)
        if not comm.is_main_process():
            return {}
        by_image = {entry[0]: entry[1:] for entry in itertools.chain.from_iterable(parts)}
        # (N, 3), sorted by image id.
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
        """Logs the results, and writes them to a file with the accuracy of each class."""
        names = self.class_names
        shares = {
            name: 100 * int(right) / int(total)
            for name, right, total in zip(names, self.confusion.diagonal(), totals, strict=True)
            if total
        }
        hardest = [f"{name} {shares[name]:.1f}" for name in sorted(shares, key=shares.__getitem__)]
        logger.info(
            f"'{self._dataset_name}': top-1 {results['top1']:.2f} +- "
            f"{results['top1_standard_error']:.2f} %, top-5 {results['top5']:.2f}, balanced "
            f"{results['balanced']:.2f} of {int(totals.sum()):,} images. "
            f"Hardest classes: {join_first(hardest, _NUM_LOGGED)}"
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
                {"class": names[i], "taken_for": names[j], "images": n}
                for i, j, n in find_confusions(self.confusion)
            ],
        }
        path = Path(self.output_dir) / "classification.json"
        write_atomically(path, json.dumps(content, indent=1).encode())


def predict(scores: Tensor) -> Tensor:
    """Takes scores (N, K). Returns the first class (N,) with the highest one, -1 if one is nan."""
    # argmax does not specify which of several equal scores it returns.
    first = (scores == scores.amax(dim=1, keepdim=True)).int().argmax(dim=1)
    return torch.where(scores.isnan().any(dim=1), -1, first)


def rank_true_class(scores: Tensor, labels: Tensor) -> Tensor:
    """Returns the zero-based ranks (N,) of the true classes, given scores (N, K) and labels (N,).

    Among equal scores, the lower label comes first. If an image has a nan score, its rank is above
    K.
    """
    true_scores = scores.gather(1, labels[:, None])
    is_lower = torch.arange(scores.shape[1], device=scores.device) < labels[:, None]
    before = ((scores > true_scores) | ((scores == true_scores) & is_lower)).sum(dim=1)
    return torch.where(scores.isnan().any(dim=1), scores.shape[1] + 5, before)


def find_confusions(confusion: Counts) -> list[tuple[int, int, int]]:
    """Returns (true class, predicted class, number of images), most frequent confusions first."""
    wrong = confusion.copy()
    np.fill_diagonal(wrong, 0)
    pairs = np.argwhere(wrong)
    order = np.argsort(-wrong[tuple(pairs.T)], kind="stable")
    return [(int(i), int(j), int(wrong[i, j])) for i, j in pairs[order]]


@torch.no_grad()
def rank_true_classes(
    train: tuple[Tensor, Tensor],
    val: tuple[Tensor, Tensor],
    *,
    k: int,
    temperature: float,
    chunk: int = _CHUNK,
) -> Tensor:
    """Returns the zero-based ranks (N,) of the true classes among the votes of neighbors.

    ``train`` are the features (T, D) and labels (T,) of the training images, which vote. ``val``
    are the features (N, D) and labels (N,) of the images to classify. At most ``k`` neighbors vote.
    A lower ``temperature`` gives more weight to the nearest neighbors. If several training images
    are equally similar, those with the lower index vote. Among equal votes, the lower label comes
    first. Classes without votes come last.
    """
    train_features, train_labels = train
    features, labels = val
    k = min(k, len(train_features))
    num_classes = int(torch.cat([train_labels, labels]).max()) + 1
    voters = F.normalize(train_features.double(), dim=1, eps=_TINY).T
    ranks = [labels[:0]]
    rows = max(1, chunk // len(train_features))
    for part, truth in zip(features.split(rows), labels.split(rows), strict=True):
        # Rounding from float64 makes similarities of equal features equal for all chunk sizes.
        similarities = (F.normalize(part.double(), dim=1, eps=_TINY) @ voters).float()
        neighbours = _first_of_the_largest(similarities, k)
        nearest = similarities.gather(1, neighbours).double()
        # The largest similarity is subtracted, because exp(1 / temperature) may overflow.
        nearest -= nearest.amax(dim=1, keepdim=True)
        weights = (nearest / temperature).exp().clamp(min=_MIN_VOTE)
        votes = weights.new_zeros(len(part), num_classes)
        votes.scatter_add_(1, train_labels[neighbours], weights)
        has_votes = votes.gather(1, truth[:, None])[:, 0] > 0
        ranks.append(torch.where(has_votes, rank_true_class(votes, truth), num_classes + 5))
    return torch.cat(ranks)


def _first_of_the_largest(values: Tensor, k: int) -> Tensor:
    """Returns the columns (N, k) of the k largest values per row, the first of equal values."""
    smallest = values.topk(k, dim=1).values[:, -1:]
    is_above = values > smallest
    is_equal = values == smallest
    num_equal = k - is_above.sum(dim=1, keepdim=True)  # number of equal values to choose
    chosen = is_above | (is_equal & (is_equal.cumsum(dim=1) <= num_equal))
    return chosen.nonzero()[:, 1].view(len(values), k)


def _summarise(ranks: Counts, right: Counts, totals: Counts) -> dict[str, float]:
    """Computes results from ranks (N,) and the numbers (K,) of correct and of all images."""
    balanced = math.nan
    error = math.nan
    if len(ranks):
        has_images = totals > 0
        shares = right[has_images] / totals[has_images]
        balanced = 100 * float(shares.mean())
        variances = shares * (1 - shares) / totals[has_images]
        error = 100 * math.sqrt(variances.sum()) / len(shares)
    results = measure_ranks(torch.as_tensor(ranks))
    return {**results, "balanced": balanced, "balanced_standard_error": error}
