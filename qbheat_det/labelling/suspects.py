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

_MIN_PROBABILITY = 0.01  # of a suspect
_NUM_REPETITIONS = 10  # of adding artificial errors
_ERROR_SHARE = 0.1  # share of boxes with an artificial error
_PRIOR = 0.02  # assumed share of boxes with an error of each kind
_DETECTED_IOU = 0.5  # smallest IoU of a prediction and the deleted box that it detects
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
    suspects: list[Suspect] = []
    for image, (truth, predicted) in enumerate(zip(annotations, predictions, strict=True)):
        suspects += compare_boxes(image, truth, predicted)
    return sorted(suspects, key=lambda suspect: -suspect.score)


def compare_boxes(image: int, truth: ImageBoxes, predicted: ImageBoxes) -> Iterator[Suspect]:
    """Yields the suspects of one image, with at most one of each kind per box."""
    if not len(predicted.boxes):
        return

    def make_suspect(kind: Kind, score: Tensor, prediction: int, annotation: int | None) -> Suspect:
        box = to_tuple(predicted.boxes[prediction])
        label = int(predicted.classes[prediction])
        correction = box
        if kind == "class" and annotation is not None:
            correction = to_tuple(truth.boxes[annotation])
        return Suspect(kind, image, float(score), annotation, box, label, correction)

    if not len(truth.boxes):
        for prediction, score in enumerate(predicted.scores):
            yield make_suspect("missing", score, prediction, None)
        return
    like = similarity(truth.boxes, predicted.boxes)  # (G, P), also the next two
    overlaps = box_iou(truth.boxes, predicted.boxes)
    is_same_class = truth.classes[:, None] == predicted.classes

    # The best prediction of an annotated object belongs to it, so it does not show a missing box.
    support = predicted.scores * like * (overlaps >= _MIN_IOU)
    claimed = set(support.argmax(1)[support.amax(1) > 0].tolist())
    for prediction, score in enumerate(predicted.scores * (1 - like.amax(0))):
        if prediction not in claimed:
            yield make_suspect("missing", score, prediction, None)

    # A prediction that another annotation of its class fits better is not the place of this one.
    fits = torch.where(is_same_class, overlaps, 0.0)
    fits_other = (fits < fits.amax(0)) & (fits.amax(0) >= _SAME_IOU)
    for index in range(len(truth.boxes)):
        agreeing = torch.where(is_same_class[index], predicted.scores * like[index], 0.0)
        movable = torch.where(fits_other[index], 0.0, agreeing)
        target = int(movable.argmax())
        if movable[target] > 0 and overlaps[index, target] >= _MIN_IOU:
            score = predicted.scores[target] * (1 - like[index, target])
            yield make_suspect("location", score, target, index)
        differing = torch.where(is_same_class[index], 0.0, predicted.scores * like[index])
        worst = int(differing.argmax())
        if differing[worst] > agreeing.max():
            yield make_suspect("class", differing[worst] - agreeing.max(), worst, index)


def to_tuple(box: Tensor) -> XYXY:
    """Converts a box (4,) to a tuple of floats."""
    x0, y0, x1, y1 = box.tolist()
    return x0, y0, x1, y1


def keep_one_per_object(suspects: Sequence[Suspect]) -> list[Suspect]:
    """Drops the suspects of objects that an earlier suspect in the list is about.

    Two suspects of an image are about one object if they have the same annotation or the same
    predicted box. They are also about one object if one of them adds or moves a box, and this box
    overlaps the predicted or the corrected box of the other with an IoU of at least 0.5.
    """
    by_image: dict[int, list[int]] = defaultdict(list)
    for position, suspect in enumerate(suspects):
        by_image[suspect.image].append(position)
    kept = []
    for positions in by_image.values():
        is_same = compare_objects([suspects[position] for position in positions])
        chosen: list[int] = []
        for row in range(len(positions)):
            if not is_same[row, chosen].any():
                chosen.append(row)
        kept += [positions[row] for row in chosen]
    return [suspects[position] for position in sorted(kept)]


def compare_objects(suspects: Sequence[Suspect]) -> npt.NDArray[np.bool_]:
    """Returns which suspects (n, n) of an image are about one object."""
    predicted = torch.tensor([suspect.box for suspect in suspects], dtype=torch.float64)
    corrected = torch.tensor([suspect.correction for suspect in suspects], dtype=torch.float64)
    overlaps = torch.maximum(box_iou(corrected, predicted), box_iou(corrected, corrected)).numpy()
    places_box = np.array([suspect.kind != "class" for suspect in suspects])
    is_placed = places_box[:, None] & (overlaps >= _SAME_IOU)
    # None becomes nan, which equals nothing.
    annotations = np.array([suspect.annotation for suspect in suspects], dtype=np.float64)
    has_same_annotation = annotations[:, None] == annotations
    has_same_prediction = (predicted[:, None] == predicted).all(-1).numpy()
    is_same: npt.NDArray[np.bool_] = is_placed | is_placed.T
    return is_same | has_same_annotation | has_same_prediction


def similarity(first: Tensor, second: Tensor) -> Tensor:
    """Returns the similarity (n, m) of boxes in [0, 1], from their IoU and their center distance.

    The center distance is divided by the diagonal of the smallest box that encloses both boxes.
    """
    if not (len(first) and len(second)):
        return torch.zeros(len(first), len(second))
    first_centres = (first[:, :2] + first[:, 2:]) / 2
    second_centres = (second[:, :2] + second[:, 2:]) / 2
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
    curves = {kind: fit_curve(kind, truth, predictions, generator) for kind in get_args(Kind)}
    calibrated = []
    for suspect in suspects:
        scores, probabilities = curves[suspect.kind]
        probability = float(np.interp(suspect.score, scores, probabilities))
        probability *= 1 - 1e-3 * (1 - suspect.score)  # breaks ties between equal probabilities
        if probability >= _MIN_PROBABILITY:
            calibrated.append(replace(suspect, score=probability))
    return keep_one_per_object(sorted(calibrated, key=lambda suspect: -suspect.score))


def fit_curve(
    kind: Kind, truth: Labelled, predictions: Labelled, generator: np.random.Generator
) -> tuple[Array, Array]:
    """Returns the scores of a kind in ascending order, and the probability of an error at each."""
    scores = []
    is_error = []
    for _ in range(_NUM_REPETITIONS):
        changed, errors = make_errors(kind, truth, generator)
        suspects = find_suspects(changed, predictions)
        for suspect in keep_one_per_object([each for each in suspects if each.kind == kind]):
            scores.append(suspect.score)
            is_error.append(is_hit(suspect, errors[suspect.image], truth[suspect.image]))
    if not any(is_error):
        return np.array([0.0, 1.0]), np.zeros(2)
    order = np.argsort(scores)
    hits = np.array(is_error, dtype=np.float64)[order]
    weights = np.where(hits > 0, _PRIOR / _ERROR_SHARE, 1.0)
    return np.array(scores)[order], isotonic_regression(hits, weights=weights).x


def make_errors(
    kind: Kind, truth: Labelled, generator: np.random.Generator
) -> tuple[Labelled, list[set[int]]]:
    """Adds artificial errors of a kind to a copy of the labels.

    Returns the changed labels, and for each image the indices in ``truth`` of the deleted, moved or
    relabelled boxes.
    """
    every_class = np.unique(np.concatenate([annotated.classes.numpy() for annotated in truth]))
    changed = []
    errors = []
    for annotated in truth:
        boxes = annotated.boxes.clone()
        classes = annotated.classes.clone()
        kept = np.ones(len(boxes), dtype=np.bool_)
        wrong = np.flatnonzero(generator.random(len(boxes)) < _ERROR_SHARE)
        if kind == "class" and len(every_class) == 1:  # there is no other class
            wrong = wrong[:0]
        for index in wrong:
            if kind == "missing":
                kept[index] = False
            elif kind == "class":
                others = every_class[every_class != int(classes[index])]
                classes[index] = int(generator.choice(others))
            else:
                sides = boxes[index, 2:] - boxes[index, :2]
                signs = torch.from_numpy(generator.choice([-1.0, 1.0], 2))
                shift = sides * signs * torch.from_numpy(generator.uniform(*_SHIFT, 2))
                boxes[index] += shift.repeat(2)
        changed.append(ImageBoxes(boxes[kept], classes[kept], annotated.scores[kept]))
        errors.append(set(wrong.tolist()))
    return changed, errors


def is_hit(suspect: Suspect, errors: set[int], truth: ImageBoxes) -> bool:
    """Returns whether a suspect is one of the artificial errors of its image."""
    if suspect.annotation is not None:
        return suspect.annotation in errors
    deleted = truth.boxes[sorted(errors)]
    box = torch.tensor([suspect.box], dtype=deleted.dtype)
    return bool(len(deleted)) and float(box_iou(box, deleted).max()) >= _DETECTED_IOU
