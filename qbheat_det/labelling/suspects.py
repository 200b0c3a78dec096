# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Scores probable errors of labels, and converts the scores to probabilities.

Missing boxes, misplaced boxes and wrong classes are scored as in
"ObjectLab: Automated Diagnosis of Mislabeled Images in Object Detection Data", arXiv:2309.00832,
with four differences. First, predictions are weighted by their score instead of thresholded at
0.95, because a detector trained on a few hundred images is rarely that certain. Second, a missing
object must not overlap an annotated box of any class, so that a wrong class is not reported twice.
Third, a box is not moved to a prediction that another annotation of its class fits better. Fourth,
each object has one suspect.

The three scores have different scales. To convert them to probabilities, artificial errors of each
kind are added to a copy of the labels. Their scores are compared with those of unchanged labels.

Notation: an image has G annotated and P predicted boxes, XYXY in pixels.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np
import numpy.typing as npt
import torch
from scipy.optimize import isotonic_regression
from torch import Tensor
from torchvision.ops import box_iou

from .labels import ImageBoxes, Kind

_LEAST = 0.01  # smallest probability of a suspect
_ROUNDS, _SHARE = 10, 0.1  # artificial errors: repetitions, and share of boxes
_PRIOR = 0.02  # assumed share of boxes with an error of each kind
_FOUND_IOU = 0.5  # smallest IoU of a prediction and the deleted box that it finds
_SHIFT = (0.3, 0.7)  # shift of a moved box, relative to its sides
_IOU_WEIGHT = 0.9  # weight of the IoU in ``similarity``
_SAME_IOU = 0.5  # smallest IoU of two boxes of one object
_MIN_IOU = 0.1  # smallest IoU of a misplaced annotation and the prediction of its object
Labelled = list[ImageBoxes]
XYXY = tuple[float, float, float, float]
Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Suspect:
    """A probable error.

    Attributes:
        kind: "missing" (an object without a box), "location" (a misplaced box) or "class".
        image: index of the image.
        score: score in [0, 1]. Errors with higher scores are more probable.
        annotation: index of the box among the annotations of the image; None if ``kind`` is
            "missing".
        box, label: box (XYXY in pixels) and class of the prediction that contradicts the labels.
        correction: the box after the correction, XYXY in pixels. It is the annotated box if
            ``kind`` is "class", and the predicted box otherwise.
    """

    kind: Kind
    image: int
    score: float
    annotation: int | None
    box: XYXY
    label: int
    correction: XYXY


def find_suspects(annotations: Labelled, predictions: Labelled) -> list[Suspect]:
    """Returns the suspects of all images, in descending order of scores."""
    found: list[Suspect] = []
    for image, (truth, seen) in enumerate(zip(annotations, predictions, strict=True)):
        found += _compare(image, truth, seen)
    return sorted(found, key=lambda suspect: -suspect.score)


def _compare(image: int, truth: ImageBoxes, seen: ImageBoxes) -> Iterator[Suspect]:
    """Yields the suspects of one image, with at most one of each kind per box."""
    if not len(seen.boxes):
        return
    like = similarity(truth.boxes, seen.boxes)  # (G, P)
    overlaps = box_iou(truth.boxes, seen.boxes)
    is_same = truth.classes[:, None] == seen.classes

    def suspect(kind: Kind, score: Tensor, prediction: int, annotation: int | None) -> Suspect:
        box = _to_tuple(seen.boxes[prediction])
        label = int(seen.classes[prediction])
        keeps_box = kind == "class" and annotation is not None
        correction = _to_tuple(truth.boxes[annotation]) if keeps_box else box
        return Suspect(kind, image, float(score), annotation, box, label, correction)

    # The best prediction of an annotated object belongs to it, so it does not show a missing box.
    support = seen.scores * like * (overlaps >= _MIN_IOU)
    claimed = set(support.argmax(1)[support.amax(1) > 0].tolist()) if len(like) else set()
    covered = like.amax(0) if len(like) else torch.zeros(len(seen.boxes))
    for prediction, score in enumerate(seen.scores * (1 - covered)):
        if prediction not in claimed:
            yield suspect("missing", score, prediction, None)
    if not len(truth.boxes):
        return
    # A prediction that another annotation of its class fits better is not the place of this one.
    fits = torch.where(is_same, overlaps, 0.0)
    is_taken = (fits < fits.amax(0)) & (fits.amax(0) >= _SAME_IOU)
    for index in range(len(truth.boxes)):
        agreeing = torch.where(is_same[index], seen.scores * like[index], 0.0)
        best = int(agreeing.argmax())
        free = torch.where(is_taken[index], 0.0, agreeing)
        own = int(free.argmax())
        if free[own] > 0 and overlaps[index, own] >= _MIN_IOU:
            score = seen.scores[own] * (1 - like[index, own])
            yield suspect("location", score, own, index)
        differing = torch.where(is_same[index], 0.0, seen.scores * like[index])
        worst = int(differing.argmax())
        if differing[worst] > agreeing[best]:
            yield suspect("class", differing[worst] - agreeing[best], worst, index)


def _to_tuple(box: Tensor) -> XYXY:
    x0, y0, x1, y1 = box.tolist()
    return x0, y0, x1, y1


def keep_one_per_object(suspects: Sequence[Suspect]) -> list[Suspect]:
    """Drops the suspects of objects that an earlier suspect in the list is about.

    Two suspects of an image are about one object if they have the same annotation or the same
    predicted box. They are also about one object if one of them adds or moves a box, and this box
    overlaps the predicted or the corrected box of the other with an IoU of at least 0.5.
    """
    by_image: dict[int, list[int]] = defaultdict(list)
    for position, one in enumerate(suspects):
        by_image[one.image].append(position)
    kept = []
    for positions in by_image.values():
        is_same = _compare_objects([suspects[position] for position in positions])
        chosen: list[int] = []
        for row in range(len(positions)):
            if not is_same[row, chosen].any():
                chosen.append(row)
        kept += [positions[row] for row in chosen]
    return [suspects[position] for position in sorted(kept)]


def _compare_objects(suspects: Sequence[Suspect]) -> npt.NDArray[np.bool_]:
    """Returns which suspects (n, n) of an image are about one object."""
    annotations = np.array([-1 if one.annotation is None else one.annotation for one in suspects])
    predicted = torch.tensor([one.box for one in suspects], dtype=torch.float64)
    corrected = torch.tensor([one.correction for one in suspects], dtype=torch.float64)
    overlaps = torch.maximum(box_iou(corrected, predicted), box_iou(corrected, corrected)).numpy()
    places_box = np.array([one.kind != "class" for one in suspects])
    is_placed = places_box[:, None] & (overlaps >= _SAME_IOU)
    has_same_annotation = (annotations[:, None] == annotations) & (annotations >= 0)
    has_same_prediction = (predicted[:, None] == predicted).all(-1).numpy()
    found: npt.NDArray[np.bool_] = is_placed | is_placed.T
    return found | has_same_annotation | has_same_prediction


def similarity(first: Tensor, second: Tensor) -> Tensor:
    """Returns the similarity (n, m) of boxes in [0, 1], from their IoU and their center distance.

    The center distance is divided by the diagonal of the smallest box that encloses both boxes.
    """
    if not (len(first) and len(second)):
        return torch.zeros(len(first), len(second))
    first_centres, second_centres = ((box[:, :2] + box[:, 2:]) / 2 for box in (first, second))
    low = torch.minimum(first[:, None, :2], second[:, :2])
    high = torch.maximum(first[:, None, 2:], second[:, 2:])
    diagonal = (high - low).norm(dim=-1).clamp(min=1e-6)
    distance = torch.cdist(first_centres, second_centres) / diagonal
    return _IOU_WEIGHT * box_iou(first, second) + (1 - _IOU_WEIGHT) * (1 - distance)


def calibrate(
    suspects: Sequence[Suspect], truth: Labelled, predictions: Labelled, seed: int
) -> list[Suspect]:
    """Replaces scores by probabilities of an error, and sorts by descending probability.

    For each object, only the most probable suspect is kept. Suspects with probabilities below 1 %
    are left out.

    Args:
        suspects: results of ``find_suspects``.
        truth: annotated boxes of each image.
        predictions: predicted boxes of each image.
        seed: seed of the artificial errors.
    """
    generator = np.random.default_rng(seed)
    curves = {kind: _fit(kind, truth, predictions, generator) for kind in get_args(Kind)}
    found = []
    for one in suspects:
        # The score breaks ties between equal probabilities.
        probability = float(np.interp(one.score, *curves[one.kind])) * (1 - 1e-3 * (1 - one.score))
        if probability >= _LEAST:
            found.append(replace(one, score=probability))
    return keep_one_per_object(sorted(found, key=lambda one: -one.score))


def _fit(
    kind: Kind, truth: Labelled, predictions: Labelled, generator: np.random.Generator
) -> tuple[Array, Array]:
    """Returns the scores of a kind in ascending order, and the probability of an error at each."""
    scores, is_error = [], []
    for _ in range(_ROUNDS):
        changed, errors = make_errors(kind, truth, generator)
        found = [one for one in find_suspects(changed, predictions) if one.kind == kind]
        for one in keep_one_per_object(found):
            scores.append(one.score)
            is_error.append(_hits(one, errors[one.image], truth[one.image]))
    if not any(is_error):
        return np.array([0.0, 1.0]), np.zeros(2)
    order = np.argsort(scores)
    hit = np.array(is_error, dtype=np.float64)[order]
    weights = np.where(hit > 0, _PRIOR / _SHARE, 1.0)
    return np.array(scores)[order], isotonic_regression(hit, weights=weights).x


def make_errors(
    kind: Kind, truth: Labelled, generator: np.random.Generator
) -> tuple[Labelled, list[set[int]]]:
    """Adds artificial errors of a kind to a copy of the labels.

    Returns the changed labels, and for each image the indices in ``truth`` of the deleted, moved or
    relabelled boxes.
    """
    classes = np.unique(np.concatenate([one.classes.numpy() for one in truth]))
    changed, errors = [], []
    for boxes, labels, scores in truth:
        own = generator.random(len(boxes)) < _SHARE
        own &= kind != "class" or len(classes) > 1
        boxes, labels = boxes.clone(), labels.clone()
        for index in np.flatnonzero(own):
            if kind == "class":
                labels[index] = int(generator.choice(classes[classes != int(labels[index])]))
            elif kind == "location":
                sides = boxes[index, 2:] - boxes[index, :2]
                signs = torch.from_numpy(generator.choice([-1.0, 1.0], 2))
                shift = sides * signs * torch.from_numpy(generator.uniform(*_SHIFT, 2))
                boxes[index] += shift.repeat(2)
        kept = ~own if kind == "missing" else np.ones(len(own), dtype=np.bool_)
        changed.append(ImageBoxes(boxes[kept], labels[kept], scores[kept]))
        errors.append(set(np.flatnonzero(own).tolist()))
    return changed, errors


def _hits(suspect: Suspect, errors: set[int], truth: ImageBoxes) -> bool:
    """Returns whether a suspect is one of the artificial errors of its image."""
    if suspect.annotation is not None:
        return suspect.annotation in errors
    deleted = truth.boxes[sorted(errors)]
    box = torch.tensor([suspect.box], dtype=deleted.dtype)
    return bool(len(deleted)) and float(box_iou(box, deleted).max()) >= _FOUND_IOU
