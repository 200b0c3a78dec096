# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Scores probable errors of labels, and converts the scores to probabilities.

Missing boxes, misplaced boxes and wrong classes are scored as in
"ObjectLab: Automated Diagnosis of Mislabeled Images in Object Detection Data", arXiv:2309.00832,
with four differences. First, predictions are weighted by their score instead of thresholded at
0.95, because a detector trained on a few hundred images is rarely that certain. Second, a missing
object must not overlap an annotated box of any class, so that a wrong class is not reported twice.
Third, a box is not moved to a prediction that another annotation of its class fits better. Fourth,
each object has one suspect.

The scores of the three kinds have different scales. To convert them to probabilities, artificial
errors of each kind are added to a copy of the labels. The probability at a score is the share of
artificial errors among the suspects with this score.

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
_SHIFT = (0.3, 0.7)  # range of the shift of an artificially misplaced box, relative to its sides
_IOU_WEIGHT = 0.9  # weight of the IoU in ``similarity``; the center distance has the rest
_SAME_IOU = 0.5  # smallest IoU of two boxes of one object
_MIN_IOU = 0.1  # smallest IoU of a misplaced annotation and the prediction of its object
Labelled = list[ImageBoxes]
"""The annotated or predicted boxes of each image."""
XYXY = tuple[float, float, float, float]
Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Suspect:
    """A probable error of the labels.

    Attributes:
        kind: "missing" (an object without a box), "location" (a misplaced box) or "class" (a wrong
            class).
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
    """Yields the suspects of the image with the index ``image``.

    A predicted box yields at most one "missing" suspect. An annotated box yields at most one
    "location" and one "class" suspect.
    """
    if not len(predicted.boxes):
        return

    def make_suspect(kind: Kind, score: Tensor, prediction: int, annotation: int | None) -> Suspect:
        """``prediction`` and ``annotation`` are indices of boxes in this image."""
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
    similarities = similarity(truth.boxes, predicted.boxes)  # (G, P)
    overlaps = box_iou(truth.boxes, predicted.boxes)  # (G, P)
    is_same_class = truth.classes[:, None] == predicted.classes  # (G, P)

    # A box is missing where a confident prediction differs from all annotated boxes. But the best
    # prediction of an annotated box shows the object of this box, not another one.
    support = predicted.scores * similarities * (overlaps >= _MIN_IOU)
    best_prediction = support.argmax(dim=1)  # (G,)
    has_prediction = support.amax(dim=1) > 0
    explained = set(best_prediction[has_prediction].tolist())
    missing_scores = predicted.scores * (1 - similarities.amax(dim=0))  # (P,)
    for prediction, score in enumerate(missing_scores):
        if prediction not in explained:
            yield make_suspect("missing", score, prediction, None)

    # A prediction belongs to another annotation if this one has the same class and a higher IoU,
    # which is at least 0.5. A box is not moved to such a prediction.
    class_overlaps = torch.where(is_same_class, overlaps, 0.0)
    best_overlap = class_overlaps.amax(dim=0)  # (P,)
    belongs_to_other = (class_overlaps < best_overlap) & (best_overlap >= _SAME_IOU)  # (G, P)
    for index in range(len(truth.boxes)):
        # How much each prediction (P,) confirms the annotated box: all predictions of the class of
        # the box, and all predictions of other classes.
        confirmation = predicted.scores * similarities[index]
        same_class = torch.where(is_same_class[index], confirmation, 0.0)
        other_class = torch.where(is_same_class[index], 0.0, confirmation)

        # The box is misplaced if the best prediction of its class is confident, but not similar.
        movable = torch.where(belongs_to_other[index], 0.0, same_class)
        target = int(movable.argmax())
        if movable[target] > 0 and overlaps[index, target] >= _MIN_IOU:
            score = predicted.scores[target] * (1 - similarities[index, target])
            yield make_suspect("location", score, target, index)

        # The class is wrong if a prediction of another class confirms the box more.
        rival = int(other_class.argmax())
        if other_class[rival] > same_class.max():
            score = other_class[rival] - same_class.max()
            yield make_suspect("class", score, rival, index)


def to_tuple(box: Tensor) -> XYXY:
    """Converts a box (4,) to a tuple of floats."""
    x0, y0, x1, y1 = box.tolist()
    return x0, y0, x1, y1


def keep_one_per_object(suspects: Sequence[Suspect]) -> list[Suspect]:
    """Keeps the first suspect of each object, in the order of the list.

    Two suspects of an image are about the same object if they have the same annotation or the same
    predicted box. They are also about the same object if one of them adds or moves a box, and this
    box overlaps the predicted or the corrected box of the other with an IoU of at least 0.5.
    """
    by_image: dict[int, list[int]] = defaultdict(list)  # positions in the list
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
    """Returns for each pair (n, n) of an image's suspects whether both are about the same object.

    ``keep_one_per_object`` defines when this is the case.
    """
    predicted = torch.tensor([suspect.box for suspect in suspects], dtype=torch.float64)
    corrected = torch.tensor([suspect.correction for suspect in suspects], dtype=torch.float64)
    overlaps = torch.maximum(box_iou(corrected, predicted), box_iou(corrected, corrected)).numpy()
    changes_box = np.array([suspect.kind != "class" for suspect in suspects])  # (n,)
    hits_other = changes_box[:, None] & (overlaps >= _SAME_IOU)  # the new box of i hits suspect j
    # None becomes nan, which is not equal to nan: missing boxes have no common annotation.
    annotations = np.array([suspect.annotation for suspect in suspects], dtype=np.float64)
    has_same_annotation = annotations[:, None] == annotations
    has_same_prediction = (predicted[:, None] == predicted).all(dim=-1).numpy()
    is_same: npt.NDArray[np.bool_] = hits_other | hits_other.T
    return is_same | has_same_annotation | has_same_prediction


def similarity(first: Tensor, second: Tensor) -> Tensor:
    """Returns the similarity (n, m) of boxes (n, 4) and (m, 4), XYXY, in [0, 1].

    It is 0.9 IoU + 0.1 (1 - d). d is the distance of the centers, divided by the diagonal of the
    smallest box that encloses both boxes.
    """
    if not (len(first) and len(second)):
        return torch.zeros(len(first), len(second))
    first_centres = (first[:, :2] + first[:, 2:]) / 2
    second_centres = (second[:, :2] + second[:, 2:]) / 2
    # Corners (n, m, 2) of the enclosing boxes.
    top_left = torch.minimum(first[:, None, :2], second[:, :2])
    bottom_right = torch.maximum(first[:, None, 2:], second[:, 2:])
    diagonal = (bottom_right - top_left).norm(dim=-1).clamp(min=1e-6)
    distance = torch.cdist(first_centres, second_centres) / diagonal
    return _IOU_WEIGHT * box_iou(first, second) + (1 - _IOU_WEIGHT) * (1 - distance)


def calibrate(
    suspects: Sequence[Suspect], truth: Labelled, predictions: Labelled, seed: int
) -> list[Suspect]:
    """Replaces scores by probabilities of an error, and sorts by descending probability.

    Keeps only the most probable suspect of each object. Leaves out suspects with probabilities
    below 1 %.

    Args:
        suspects: results of ``find_suspects``.
        truth: annotated boxes of each image.
        predictions: predicted boxes of each image.
        seed: seed of the artificial errors.
    """
    generator = np.random.default_rng(seed)
    curves = {}
    for kind in get_args(Kind):
        curves[kind] = fit_curve(kind, truth, predictions, generator)
    calibrated = []
    for suspect in suspects:
        scores, probabilities = curves[suspect.kind]
        probability = float(np.interp(suspect.score, scores, probabilities))
        # The curve has flat parts. There, suspects with higher scores come first.
        probability *= 1 - 1e-3 * (1 - suspect.score)
        if probability >= _MIN_PROBABILITY:
            calibrated.append(replace(suspect, score=probability))
    return keep_one_per_object(sorted(calibrated, key=lambda suspect: -suspect.score))


def fit_curve(
    kind: Kind, truth: Labelled, predictions: Labelled, generator: np.random.Generator
) -> tuple[Array, Array]:
    """Estimates the probability of an error of a kind as a function of its score.

    Returns (ascending scores, the probability at each score). The probability never decreases.
    """
    scores = []
    is_error = []
    for _ in range(_NUM_REPETITIONS):
        changed, errors = make_errors(kind, truth, generator)
        suspects = find_suspects(changed, predictions)
        suspects = [suspect for suspect in suspects if suspect.kind == kind]
        for suspect in keep_one_per_object(suspects):
            scores.append(suspect.score)
            is_error.append(is_hit(suspect, errors[suspect.image], truth[suspect.image]))
    if not any(is_error):  # probability 0 at all scores
        return np.array([0.0, 1.0]), np.zeros(2)
    order = np.argsort(scores)
    hits = np.array(is_error, dtype=np.float64)[order]
    # There are more artificial errors (10 % of the boxes) than real ones (2 %, by assumption).
    weights = np.where(hits > 0, _PRIOR / _ERROR_SHARE, 1.0)
    probabilities = isotonic_regression(hits, weights=weights).x
    return np.array(scores)[order], probabilities


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
        if kind == "class" and len(every_class) == 1:  # no box can get another class
            wrong = np.array([], dtype=np.int64)
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
                boxes[index] += shift.repeat(2)  # both corners
        changed.append(ImageBoxes(boxes[kept], classes[kept], annotated.scores[kept]))
        errors.append(set(wrong.tolist()))
    return changed, errors


def is_hit(suspect: Suspect, errors: set[int], truth: ImageBoxes) -> bool:
    """Returns whether a suspect is an artificial error.

    ``errors`` has the indices of the artificial errors among the boxes ``truth`` of the image.
    """
    if suspect.annotation is not None:
        return suspect.annotation in errors
    if not errors:
        return False
    # A missing box has no annotation. It is found if the prediction overlaps a deleted box.
    deleted = truth.boxes[sorted(errors)]
    box = torch.tensor([suspect.box], dtype=deleted.dtype)
    return float(box_iou(box, deleted).max()) >= _DETECTED_IOU
