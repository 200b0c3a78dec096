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
_NUM_LOGGED = 5  # the log names the classes with the lowest accuracies
_TINY = torch.finfo(torch.float64).tiny
_MIN_VOTE = 1e-300  # keeps the votes of distant neighbors above zero
_CHUNK = 2**24  # largest number of similarities in memory (128 MB in float64)


def measure_ranks(ranks: Tensor) -> dict[str, float]:
    """Computes top-1 and top-5 accuracy from the zero-based ranks (N,) of the true classes.

    Returns "top1", "top5", and their binomial standard errors "top1_standard_error" and
    "top5_standard_error". Values are in percent, or nan if there are no images.
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

    Results are ``{"classification": {"top1", "top5", "balanced"}}``. Each has a standard error, for
    example with the key "top1_standard_error". All values are in percent, or nan if there are no
    images. Among equal scores, the first class wins. An image with a nan score is counted as wrong.

    Attributes:
        confusion: (K, K) numbers of images, on the main process after ``evaluate``. Row i and
            column j count the images of class i that are classified as class j.
    """

    confusion: Counts

    def __init__(
        self, dataset_name: str, *, class_names: Sequence[str], output_dir: str | None = None
    ) -> None:
        """
        Args:
            dataset_name: name of the data set, for messages.
            class_names: the model's classes, in contiguous order.
            output_dir: folder for ``classification.json``, which has the results, the accuracy of
                each class and the confusions. None writes no file.
        """
        num_classes = len(class_names)
        self._dataset_name = dataset_name
        self.class_names = tuple(class_names)
        self.output_dir = output_dir
        self.confusion = np.zeros((num_classes, num_classes), dtype=np.int64)
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
        predictions = predict(scores).tolist()
        ranks = rank_true_class(scores, torch.tensor(labels, device=scores.device)).tolist()
        for entry, label, prediction, rank in zip(inputs, labels, predictions, ranks, strict=True):
            self._seen.append((entry["image_id"], label, prediction, rank))

    def evaluate(self) -> dict[str, dict[str, float]]:
        """Gathers all ranks. Returns results on the main process, and ``{}`` on others."""
        parts = comm.gather(self._seen, dst=0)
        if not comm.is_main_process():
            return {}
        # An image that was processed twice counts once.
        by_image = {}
        for image_id, label, prediction, rank in itertools.chain.from_iterable(parts):
            by_image[image_id] = (label, prediction, rank)
        rows = np.array([by_image[image_id] for image_id in sorted(by_image)], dtype=np.int64)
        labels, predictions, ranks = rows.reshape(-1, 3).T  # (N,) each; N may be 0
        num_classes = len(self.class_names)
        confusion = np.zeros((num_classes, num_classes), dtype=np.int64)
        is_predicted = predictions >= 0  # -1 for images with a nan score
        np.add.at(confusion, (labels[is_predicted], predictions[is_predicted]), 1)
        self.confusion = confusion
        totals = np.bincount(labels, minlength=num_classes)
        results = _summarise(ranks, self.confusion.diagonal(), totals)
        self._report(results, totals)
        return {"classification": results}

    def _report(self, results: dict[str, float], totals: Counts) -> None:
        """Logs the results, and writes them to a file with the accuracy of each class."""
        names = self.class_names
        accuracies: dict[str, float] = {}  # in percent, of the classes with images
        for name, num_right, total in zip(names, self.confusion.diagonal(), totals, strict=True):
            if total:
                accuracies[name] = 100 * int(num_right) / int(total)
        hardest_names = sorted(accuracies, key=lambda name: accuracies[name])
        hardest = [f"{name} {accuracies[name]:.1f}" for name in hardest_names]
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
                {"name": name, "images": int(total), "top1": accuracies.get(name)}
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
    """Returns the classes (N,) with the highest of the scores (N, K).

    Among equal scores, the first class is returned. If an image has a nan score, returns -1.
    """
    # ``scores.argmax`` does not specify which of several equal scores it returns. Here, argmax is
    # applied to zeros and ones on the way to the first one.
    is_highest = scores == scores.amax(dim=1, keepdim=True)  # (N, K)
    first_class = is_highest.int().argmax(dim=1)
    return torch.where(scores.isnan().any(dim=1), -1, first_class)


def rank_true_class(scores: Tensor, labels: Tensor) -> Tensor:
    """Returns the zero-based ranks (N,) of the true classes, given scores (N, K) and labels (N,).

    The rank is the number of classes that come before the true class. Among equal scores, the lower
    label comes first. If an image has a nan score, its rank is K + 5, which is in no top 5.
    """
    num_classes = scores.shape[1]
    true_scores = scores.gather(1, labels[:, None])  # (N, 1)
    is_lower_label = torch.arange(num_classes, device=scores.device) < labels[:, None]  # (N, K)
    is_before = (scores > true_scores) | ((scores == true_scores) & is_lower_label)
    return torch.where(scores.isnan().any(dim=1), num_classes + 5, is_before.sum(dim=1))


def find_confusions(confusion: Counts) -> list[tuple[int, int, int]]:
    """Returns (true class, predicted class, number of images), most frequent confusions first.

    ``confusion`` (K, K) has a row for each true class. Pairs without images are left out.
    """
    confusions: list[tuple[int, int, int]] = []
    for true_class, predicted_class in np.argwhere(confusion):
        if true_class != predicted_class:
            num_images = confusion[true_class, predicted_class]
            confusions.append((int(true_class), int(predicted_class), int(num_images)))
    return sorted(confusions, key=lambda entry: -entry[2])


@torch.no_grad()
def rank_true_classes(
    train: tuple[Tensor, Tensor],
    val: tuple[Tensor, Tensor],
    *,
    k: int,
    temperature: float,
    chunk: int = _CHUNK,
) -> Tensor:
    """Classifies images by their nearest training images, which vote for their classes.

    If several training images are equally similar, those with the lower index vote. Among equal
    votes, the lower label comes first.

    Args:
        train: features (T, D) and labels (T,) of the training images.
        val: features (N, D) and labels (N,) of the images to classify.
        k: number of training images that vote, at most T.
        temperature: a lower value gives more weight to the nearest neighbors.
        chunk: largest number of similarities in memory.

    Returns:
        The zero-based ranks (N,) of the true classes. If the true class of an image has no votes,
        its rank is K + 5, which is in no top 5.
    """
    train_features, train_labels = train
    features, labels = val
    k = min(k, len(train_features))
    num_classes = int(torch.cat([train_labels, labels]).max()) + 1
    unit_train = F.normalize(train_features.double(), dim=1, eps=_TINY).T  # (D, T)
    ranks = [labels[:0]]  # so that ``torch.cat`` also works without images
    rows = max(1, chunk // len(train_features))
    for part, true_labels in zip(features.split(rows), labels.split(rows), strict=True):
        unit_part = F.normalize(part.double(), dim=1, eps=_TINY)  # (rows, D)
        # Rounding from float64 makes similarities of equal features equal for all chunk sizes.
        similarities = (unit_part @ unit_train).float()  # (rows, T)
        neighbors = _find_k_largest(similarities, k)  # (rows, k)
        nearest = similarities.gather(1, neighbors).double()
        # The largest similarity is subtracted, because exp(1 / temperature) may overflow.
        nearest -= nearest.amax(dim=1, keepdim=True)
        weights = (nearest / temperature).exp().clamp(min=_MIN_VOTE)
        votes = weights.new_zeros(len(part), num_classes)
        votes.scatter_add_(1, train_labels[neighbors], weights)
        has_votes = votes.gather(1, true_labels[:, None])[:, 0] > 0
        part_ranks = rank_true_class(votes, true_labels)
        ranks.append(torch.where(has_votes, part_ranks, num_classes + 5))
    return torch.cat(ranks)


def _find_k_largest(values: Tensor, k: int) -> Tensor:
    """Returns the columns (N, k) of the k largest values (N, T) of each row.

    Among equal values, the first columns are taken, which ``topk`` does not guarantee.
    """
    kth_largest = values.topk(k, dim=1).values[:, -1:]  # (N, 1)
    is_above = values > kth_largest
    is_equal = values == kth_largest
    num_equal = k - is_above.sum(dim=1, keepdim=True)  # (N, 1): how many equal values to take
    is_first_equal = is_equal & (is_equal.cumsum(dim=1) <= num_equal)
    is_taken = is_above | is_first_equal  # (N, T), k in each row
    return is_taken.nonzero()[:, 1].view(len(values), k)


def _summarise(ranks: Counts, num_right: Counts, totals: Counts) -> dict[str, float]:
    """Computes all results.

    Args:
        ranks: zero-based ranks (N,) of the true classes.
        num_right: number (K,) of correctly classified images of each class.
        totals: number (K,) of images of each class.
    """
    balanced = math.nan
    error = math.nan
    if len(ranks):
        has_images = totals > 0
        shares = num_right[has_images] / totals[has_images]  # accuracy of each class
        balanced = 100 * float(shares.mean())
        variances = shares * (1 - shares) / totals[has_images]
        error = 100 * math.sqrt(variances.sum()) / len(shares)
    results = measure_ranks(torch.as_tensor(ranks))
    return {**results, "balanced": balanced, "balanced_standard_error": error}
