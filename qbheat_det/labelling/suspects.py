# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Ranks annotations that are probably wrong: overlooked objects, misplaced boxes, wrong classes.

The three scores follow "ObjectLab: Automated Diagnosis of Mislabeled Images in Object Detection
Data", arXiv:2309.00832. They compare annotations with predictions of a detector that was not
trained on the image. Differences: a score is continuous in the probability of the prediction
instead of thresholded at 0.95, since a detector of a few hundred images is rarely that certain; and
an overlooked object must not overlap a box of any class, so that a wrong class is reported once.

Letters: G annotated and P predicted boxes of an image, XYXY in pixels.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torchvision.ops import box_iou

Kind = Literal["missing", "location", "class"]
_IOU_WEIGHT = 0.9  # of the similarity; the rest is the distance of the centres
_MIN_IOU = 0.1  # with which a prediction is of the same object as a misplaced annotation


class ImageBoxes(NamedTuple):
    """Boxes of one image: (n, 4) XYXY in pixels, classes (n,), scores (n,), of annotations ones."""

    boxes: Tensor
    classes: Tensor
    scores: Tensor


@dataclass(frozen=True)
class Suspect:
    """A probable error.

    Attributes:
        kind: an object without a box, a box in a wrong place, or a box of a wrong class.
        image: index of the image.
        score: in [0, 1]; the higher, the more probable the error.
        annotation: index of the box among the image's annotations; None of "missing".
        box, label: the prediction that contradicts it: XYXY in pixels, and its class.
    """

    kind: Kind
    image: int
    score: float
    annotation: int | None
    box: tuple[float, float, float, float]
    label: int


def find_suspects(
    annotations: Sequence[ImageBoxes], predictions: Sequence[ImageBoxes]
) -> list[Suspect]:
    """Returns the probable errors of all images, the most probable first."""
    pairs = enumerate(zip(annotations, predictions, strict=True))
    found = [suspect for image, (truth, seen) in pairs for suspect in compare(image, truth, seen)]
    return sorted(found, key=lambda suspect: -suspect.score)


def compare(image: int, truth: ImageBoxes, seen: ImageBoxes) -> Iterator[Suspect]:
    """Yields the suspects of one image, at most one of each kind for each box."""
    if not len(seen.boxes):
        return
    like = similarity(truth.boxes, seen.boxes)  # (G, P)
    overlaps = box_iou(truth.boxes, seen.boxes)
    is_same = truth.classes[:, None] == seen.classes

    def suspect(kind: Kind, score: Tensor, prediction: int, annotation: int | None) -> Suspect:
        x0, y0, x1, y1 = seen.boxes[prediction].tolist()
        label = int(seen.classes[prediction])
        return Suspect(kind, image, float(score), annotation, (x0, y0, x1, y1), label)

    # The best prediction of an annotated object says where that object is, not that one is missing.
    support = seen.scores * like * (overlaps >= _MIN_IOU)
    claimed = set(support.argmax(1)[support.amax(1) > 0].tolist()) if len(like) else set()
    covered = like.amax(0) if len(like) else torch.zeros(len(seen.boxes))
    for prediction, score in enumerate(seen.scores * (1 - covered)):
        if prediction not in claimed:
            yield suspect("missing", score, prediction, None)
    for index in range(len(truth.boxes)):
        agreeing = torch.where(is_same[index], seen.scores * like[index], 0.0)
        best = int(agreeing.argmax())
        if is_same[index, best] and overlaps[index, best] >= _MIN_IOU:
            score = seen.scores[best] * (1 - like[index, best])
            yield suspect("location", score, best, index)
        differing = torch.where(is_same[index], 0.0, seen.scores * like[index])
        worst = int(differing.argmax())
        if differing[worst] > agreeing[best]:
            yield suspect("class", differing[worst] - agreeing[best], worst, index)


def similarity(first: Tensor, second: Tensor) -> Tensor:
    """Returns the similarity (n, m) of boxes in [0, 1]: their IoU and the closeness of centres.

    The distance of two centres is measured in diagonals of the box that encloses both.
    """
    if not (len(first) and len(second)):
        return torch.zeros(len(first), len(second))
    first_centres, second_centres = ((box[:, :2] + box[:, 2:]) / 2 for box in (first, second))
    low = torch.minimum(first[:, None, :2], second[:, :2])
    high = torch.maximum(first[:, None, 2:], second[:, 2:])
    diagonal = (high - low).norm(dim=-1).clamp(min=1e-6)
    distance = torch.cdist(first_centres, second_centres) / diagonal
    return _IOU_WEIGHT * box_iou(first, second) + (1 - _IOU_WEIGHT) * (1 - distance)
