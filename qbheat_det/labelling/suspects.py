# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Finds probable errors of labels, each with the probability that the label is wrong.

Two sources tell about a box: the predictions of a detector that was not trained on its image, and
the judgement of its features (``appearance``). Each kind of error has its own evidence, a vector of
a few numbers. The evidence is inspired by "ObjectLab: Automated Diagnosis of Mislabeled Images in
Object Detection Data", arXiv:2309.00832, which compares labels with predictions alone.

To convert evidence to a probability, errors are made on purpose. The evidence of each box is
computed a second time as if the box were shifted, as if it had another class, and as if it were
deleted. Logistic regression distinguishes this evidence from that of the labels as they are. Every
kind of error is assumed to be in 2 % of the boxes, so the probabilities of different kinds can be
compared. Two boxes on one object need no evidence: they overlap.

Notation: an image has G annotated and P predicted boxes, XYXY in pixels. There are K classes.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F
from torchvision.ops import box_iou

from qbheat_det.api import fit_penalised

from .appearance import Judgement, Judgements
from .labels import NEW_BOX_KINDS, ImageBoxes, Kind

_MIN_PROBABILITY = 0.01  # of a suspect
_MIN_MOVE_PROBABILITY = 0.05  # of a misplaced box that explains a missing one
_PRIOR = 0.02  # assumed share of boxes with an error of each kind
_SAME_IOU = 0.5  # smallest IoU of two boxes of one object
_DUPLICATE_IOU = 0.8  # smallest IoU of two annotated boxes that repeat each other
_REACH = 0.8  # distance at which an object's evidence for a shift is exp(-1/2), in sides of the box
_MIN_PULL = 0.02  # a box is moved to a prediction with at least this evidence, or else removed
_PENALTY = 1e-3  # L2 penalty of the logistic regression on evidence
Labelled = Sequence[ImageBoxes]
"""The annotated or predicted boxes of each image."""
XYXY = tuple[float, float, float, float]


@dataclass(frozen=True)
class Suspect:
    """A probable error of the labels.

    Attributes:
        kind: "missing" (an object without a box), "location" (a misplaced box), "class" (a wrong
            class), "extra" (a box without an object) or "duplicate" (a second box of an object).
        image: index of the image.
        score: probability of the error.
        annotation: index of the box among the annotations of the image; None if ``kind`` is
            "missing".
        box, label: predicted box (XYXY in pixels) and class that contradict the labels. ``box`` is
            the annotated box if ``kind`` is neither "missing" nor "location". ``label`` is that of
            the other box if ``kind`` is "duplicate".
    """

    kind: Kind
    image: int
    score: float
    annotation: int | None
    box: XYXY
    label: int


class Evidence(NamedTuple):
    """Candidates for errors of a kind, and what speaks for each of them.

    Attributes:
        suspects: the n candidates. Their scores are not known yet.
        values: the evidence (n, E).
        made: the evidence (m, E) of errors that were made on purpose.
    """

    suspects: list[Suspect]
    values: Tensor
    made: Tensor


def find_suspects(
    annotations: Labelled,
    predictions: Labelled,
    judgements: Judgements,
    category_ids: Sequence[int],
    *,
    seed: int,
) -> list[Suspect]:
    """Returns the suspects of all images, most probable first. Each object has at most one.

    Suspects with probabilities below 1 % are left out.

    Args:
        annotations: annotated boxes of each image.
        predictions: predicted boxes of each image.
        judgements: results of ``appearance.judge_boxes``.
        category_ids: ids of the K classes, in the order of the classes of a judgement.
        seed: seed of the errors that are made on purpose.
    """
    suspects = find_duplicates(annotations, judgements, category_ids)
    for evidence in (
        collect_missing(annotations, predictions, judgements, category_ids),
        collect_misplaced(annotations, predictions, judgements),
        collect_wrong_classes(annotations, predictions, judgements, category_ids, seed),
    ):
        suspects += estimate_probabilities(evidence)
    suspects = join_moves(suspects)
    probable = [suspect for suspect in suspects if suspect.score >= _MIN_PROBABILITY]
    # Of equal probabilities, a misplaced box comes before the missing one.
    order = sorted(probable, key=lambda suspect: (-suspect.score, suspect.kind == "missing"))
    return keep_one_per_object(order)


def join_moves(suspects: Sequence[Suspect]) -> list[Suspect]:
    """Raises the probability of misplaced boxes to that of the box that is missing at the object.

    A misplaced box leaves its object without a box, so both suspects are about one error. Only
    boxes that are misplaced with a probability of at least 5 % are considered.
    """
    missing = {}
    for suspect in suspects:
        if suspect.kind == "missing":
            missing[suspect.image, suspect.box] = suspect.score
    joined = []
    for suspect in suspects:
        score = suspect.score
        if suspect.kind == "location" and score >= _MIN_MOVE_PROBABILITY:
            score = max(score, missing.get((suspect.image, suspect.box), 0.0))
        joined.append(replace(suspect, score=score))
    return joined


def estimate_probabilities(evidence: Evidence) -> list[Suspect]:
    """Returns the candidates with the probabilities that their evidence gives them."""
    num_candidates = len(evidence.values)
    if not num_candidates or not len(evidence.made):
        return []
    inputs = torch.cat([evidence.values, evidence.made])
    is_made = torch.zeros(len(inputs), dtype=torch.long)
    is_made[num_candidates:] = 1
    classifier = fit_penalised(inputs, is_made, num_classes=2, l2=_PENALTY)
    logits = classifier(evidence.values)
    # Of the boxes, 2 % have an error by assumption. An error was made of each of them.
    probabilities = (logits[:, 1] - logits[:, 0] + np.log(_PRIOR)).sigmoid().tolist()
    pairs = zip(evidence.suspects, probabilities, strict=True)
    return [replace(suspect, score=probability) for suspect, probability in pairs]


def find_duplicates(
    annotations: Labelled, judgements: Judgements, category_ids: Sequence[int]
) -> list[Suspect]:
    """Returns a suspect for each pair of annotated boxes with an IoU of at least 0.8.

    The IoU is the score. Of two boxes with different classes, the suspect is the one whose class is
    less probable. Of two boxes of one class, it is the one that fits worse.
    """
    index_of = {category: index for index, category in enumerate(category_ids)}
    suspects = []
    for image, (truth, judged) in enumerate(zip(annotations, judgements.annotated, strict=True)):
        overlaps = box_iou(truth.boxes, truth.boxes).triu(diagonal=1)
        for first, second in (overlaps >= _DUPLICATE_IOU).nonzero().tolist():
            doubts = {}
            for index in (first, second):
                label = int(truth.classes[index])
                if truth.classes[first] == truth.classes[second]:
                    doubts[index] = float(judged.misfit[index])
                else:
                    doubts[index] = -float(judged.log_probabilities[index, index_of[label]])
            wrong = max(doubts, key=lambda index: (doubts[index], index))
            other = first + second - wrong
            score = float(overlaps[first, second])
            box = to_tuple(truth.boxes[wrong])
            label = int(truth.classes[other])
            suspects.append(Suspect("duplicate", image, score, wrong, box, label))
    return suspects


def collect_missing(
    annotations: Labelled,
    predictions: Labelled,
    judgements: Judgements,
    category_ids: Sequence[int],
) -> Evidence:
    """Collects the evidence for boxes that are missing, from each prediction of an image.

    Evidence: the detector's precision for this score, class and size; the highest IoU and the
    highest similarity with an annotated box; what the features say about class and fit.

    A missing box is made of each annotated box that a prediction overlaps with an IoU of at least
    0.5: the evidence of the most confident one, without the annotated box.
    """
    precision = estimate_precision(annotations, predictions, category_ids)
    index_of = {category: index for index, category in enumerate(category_ids)}
    suspects = []
    values = [torch.zeros(0, 5, dtype=torch.float64)]
    made = [torch.zeros(0, 5, dtype=torch.float64)]
    for image, (truth, predicted) in enumerate(zip(annotations, predictions, strict=True)):
        if not len(predicted.boxes):
            continue
        judged = judgements.predicted[image]
        columns = torch.tensor([index_of[int(label)] for label in predicted.classes])
        own_log = judged.log_probabilities.gather(1, columns[:, None])[:, 0]
        fixed = torch.stack([precision[image], own_log, judged.misfit], dim=1).double()  # (P, 3)
        overlaps = pad_rows(box_iou(truth.boxes, predicted.boxes))
        similarities = pad_rows(similarity(truth.boxes, predicted.boxes))
        best_overlaps, best_rows = overlaps.topk(2, dim=0)  # (2, P)
        best_similarities = similarities.topk(2, dim=0).values
        values.append(torch.column_stack([fixed, best_overlaps[0], best_similarities[0]]))
        for position in range(len(predicted.boxes)):
            box = to_tuple(predicted.boxes[position])
            label = int(predicted.classes[position])
            suspects.append(Suspect("missing", image, 0.0, None, box, label))
        without_best = torch.column_stack([fixed, best_overlaps[1], best_similarities[1]])
        for row in range(len(truth.boxes)):
            shows = (best_rows[0] == row) & (best_overlaps[0] >= _SAME_IOU)
            if shows.any():
                best = int(torch.where(shows, predicted.scores, -1.0).argmax())
                made.append(without_best[best : best + 1])
    return Evidence(suspects, torch.cat(values), torch.cat(made))


def pad_rows(table: Tensor) -> Tensor:
    """Appends zeros so that a table (G, P) has two rows or more."""
    return F.pad(table, (0, 0, 0, max(0, 2 - len(table))))


def estimate_precision(
    annotations: Labelled, predictions: Labelled, category_ids: Sequence[int]
) -> list[Tensor]:
    """Returns the logit (P,) of the precision that each prediction of an image is expected to have.

    It is logistic regression on score, class and size of the box. A prediction is right if it
    overlaps an annotated box of its class with an IoU of at least 0.5.
    """
    inputs = []
    is_right = []
    classes = torch.tensor(list(category_ids))
    for truth, predicted in zip(annotations, predictions, strict=True):
        is_same_class = truth.classes[:, None] == predicted.classes  # (G, P)
        overlaps = box_iou(truth.boxes, predicted.boxes) * is_same_class
        is_right.append((overlaps >= _SAME_IOU).any(dim=0))
        one_hot = (predicted.classes[:, None] == classes).double()  # (P, K)
        score = predicted.scores.double().clamp(1e-4, 1 - 1e-4).logit()[:, None]
        sides = predicted.boxes[:, 2:] - predicted.boxes[:, :2]
        size = sides.prod(dim=1).clamp(min=1).log()[:, None].double() / 2
        inputs.append(torch.cat([one_hot, one_hot * score, score, size, size.square()], dim=1))
    stacked = torch.cat(inputs)
    targets = torch.cat(is_right).long()
    if not len(targets) or targets.min() == targets.max():  # the precision is always the same
        return [own[:, 2 * len(classes)] for own in inputs]
    classifier = fit_penalised(stacked, targets, num_classes=2, l2=_PENALTY)
    logits = [classifier(own) for own in inputs]
    return [own[:, 1] - own[:, 0] for own in logits]


def collect_misplaced(
    annotations: Labelled, predictions: Labelled, judgements: Judgements
) -> Evidence:
    """Collects the evidence for misplaced boxes, from each annotated box.

    A box without a prediction that it could be moved to is "extra".
    """
    suspects = []
    values = [torch.zeros(0, 5, dtype=torch.float64)]
    made = [torch.zeros(0, 5, dtype=torch.float64)]
    for image, (truth, predicted) in enumerate(zip(annotations, predictions, strict=True)):
        if not len(truth.boxes):
            continue
        own, targets = compare_places(truth, truth, predicted, judgements.annotated[image])
        values.append(own)
        copies = judgements.copies[image]
        made.append(compare_places(truth, copies, predicted, judgements.shifted[image])[0])
        for row, target in enumerate(targets):
            label = int(truth.classes[row])
            kind: Kind = "extra"
            box = to_tuple(truth.boxes[row])
            if target is not None:
                kind = "location"
                box = to_tuple(predicted.boxes[target])
            suspects.append(Suspect(kind, image, 0.0, row, box, label))
    return Evidence(suspects, torch.cat(values), torch.cat(made))


def compare_places(
    truth: ImageBoxes, boxes: ImageBoxes, predicted: ImageBoxes, judged: Judgement
) -> tuple[Tensor, list[int | None]]:
    """Compares the places of boxes with the predictions of an image.

    Args:
        truth: the G annotated boxes.
        boxes: the same boxes, which may be shifted.
        predicted: the P predicted boxes.
        judged: judgement of ``boxes``.

    Returns:
        The evidence (G, 5) for a shift, and the index of the prediction that each box should be
        moved to; None if there is none. Evidence: what the features say about the fit and about the
        most probable class; the support by predictions of the class and of any class (score x IoU);
        and the pull of the prediction to move to (score x (1 - IoU) x how near it is).

        A prediction belongs to another annotated box of the same class if it overlaps this box
        more, with an IoU of at least 0.5. No box is moved to such a prediction.
    """
    num_boxes = len(truth.boxes)
    certainty = judged.log_probabilities.amax(dim=1)
    if not len(predicted.boxes):
        zeros = torch.zeros(num_boxes, dtype=torch.float64)
        evidence = torch.stack([judged.misfit, certainty, zeros, zeros, zeros], dim=1)
        return evidence.double(), [None] * num_boxes
    is_same_class = truth.classes[:, None] == predicted.classes  # (G, P)
    overlaps = box_iou(boxes.boxes, predicted.boxes)  # (G, P)
    annotated_overlaps = pad_rows(box_iou(truth.boxes, predicted.boxes) * is_same_class)
    best_overlaps, best_rows = annotated_overlaps.topk(2, dim=0)  # (2, P)
    rows = torch.arange(num_boxes)[:, None]
    other_overlaps = torch.where(best_rows[0] == rows, best_overlaps[1], best_overlaps[0])  # (G, P)
    belongs_to_other = (other_overlaps >= _SAME_IOU) & (other_overlaps > overlaps)
    support = predicted.scores * overlaps
    pull = predicted.scores * (1 - overlaps) * nearness(boxes.boxes, predicted.boxes)
    pull = torch.where(is_same_class & ~belongs_to_other, pull, 0.0)
    best_pull, best_target = pull.max(dim=1)
    evidence = torch.stack(
        [
            judged.misfit,
            certainty,
            (support * is_same_class).amax(dim=1),
            support.amax(dim=1),
            best_pull,
        ],
        dim=1,
    )
    targets: list[int | None] = []
    for value, target in zip(best_pull.tolist(), best_target.tolist(), strict=True):
        targets.append(target if value >= _MIN_PULL else None)
    return evidence.double(), targets


def nearness(first: Tensor, second: Tensor) -> Tensor:
    """Returns how near boxes (m, 4) of similar sizes are to boxes (n, 4), as (n, m) in [0, 1].

    It is exp(-d² / 2) times the ratio of the smaller area to the larger one. d is the distance of
    the centers, divided by 0.8 and by the root of the area of the first box.
    """
    centers = [(boxes[:, :2] + boxes[:, 2:]) / 2 for boxes in (first, second)]
    areas = [(boxes[:, 2:] - boxes[:, :2]).prod(dim=1).clamp(min=1e-6) for boxes in (first, second)]
    distance = torch.cdist(centers[0], centers[1]) / (_REACH * areas[0].sqrt()[:, None])
    ratio = areas[0][:, None] / areas[1]
    return (-distance.square() / 2).exp() * torch.minimum(ratio, 1 / ratio)


def collect_wrong_classes(
    annotations: Labelled,
    predictions: Labelled,
    judgements: Judgements,
    category_ids: Sequence[int],
    seed: int,
) -> Evidence:
    """Collects the evidence for wrong classes, from each annotated box.

    Evidence: by how much another class is more probable than the annotated one, according to the
    features (difference of logarithms) and to the predictions (difference of score x similarity);
    and what the features say about the fit. A wrong class is made of each box by drawing another
    class at random.
    """
    suspects: list[Suspect] = []
    empty = torch.zeros(0, 3, dtype=torch.float64)
    if len(category_ids) == 1:
        return Evidence(suspects, empty, empty)
    generator = np.random.default_rng(seed)
    index_of = {category: index for index, category in enumerate(category_ids)}
    values = [empty]
    made = [empty]
    for image, (truth, predicted) in enumerate(zip(annotations, predictions, strict=True)):
        judged = judgements.annotated[image]
        if not len(truth.boxes):
            continue
        confirmation = confirm_classes(truth, predicted, category_ids)
        columns = torch.tensor([index_of[int(label)] for label in truth.classes])
        steps = torch.from_numpy(generator.integers(1, len(category_ids), len(columns)))
        wrong_columns = (columns + steps) % len(category_ids)
        own, rivals = compare_classes(judged, confirmation, columns)
        values.append(own)
        made.append(compare_classes(judged, confirmation, wrong_columns)[0])
        for row, rival in enumerate(rivals.tolist()):
            box = to_tuple(truth.boxes[row])
            suspects.append(Suspect("class", image, 0.0, row, box, category_ids[rival]))
    return Evidence(suspects, torch.cat(values), torch.cat(made))


def confirm_classes(
    truth: ImageBoxes, predicted: ImageBoxes, category_ids: Sequence[int]
) -> Tensor:
    """Returns how much the predictions of each class confirm each annotated box, (G, K).

    It is the largest product of score and similarity.
    """
    confirmation = torch.zeros(len(truth.boxes), len(category_ids), dtype=torch.float64)
    if not len(predicted.boxes):
        return confirmation
    support = predicted.scores * similarity(truth.boxes, predicted.boxes)  # (G, P)
    for column, category in enumerate(category_ids):
        is_own = predicted.classes == category
        if is_own.any():
            confirmation[:, column] = support[:, is_own].amax(dim=1)
    return confirmation


def compare_classes(
    judged: Judgement, confirmation: Tensor, columns: Tensor
) -> tuple[Tensor, Tensor]:
    """Compares the classes of boxes with the most probable other ones.

    Args:
        judged: judgement of the G boxes.
        confirmation: results of ``confirm_classes``, (G, K).
        columns: columns (G,) of the annotated classes in these tables.

    Returns:
        The evidence (G, 3) for a wrong class, and the column (G,) of the most probable other class.
    """
    is_rival = torch.ones_like(confirmation, dtype=torch.bool)
    is_rival.scatter_(1, columns[:, None], False)
    margins = []
    for table in (judged.log_probabilities.double(), confirmation):
        own = table.gather(1, columns[:, None])[:, 0]
        lowest = table.amin(dim=1, keepdim=True)
        margins.append(torch.where(is_rival, table, lowest).amax(dim=1) - own)
    rivals = judged.log_probabilities.masked_fill(~is_rival, -torch.inf).argmax(dim=1)
    return torch.stack([*margins, judged.misfit.double()], dim=1), rivals


def to_tuple(box: Tensor) -> XYXY:
    """Converts a box (4,) to a tuple of floats."""
    x0, y0, x1, y1 = box.tolist()
    return x0, y0, x1, y1


def keep_one_per_object(suspects: Sequence[Suspect]) -> list[Suspect]:
    """Keeps the first suspect of each object, in the order of the list.

    Two suspects of an image are about the same object if they have the same annotation or the same
    predicted box. They are also about the same object if one of them adds or moves a box, and this
    box overlaps the box of the other with an IoU of at least 0.5.
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
    boxes = torch.tensor([suspect.box for suspect in suspects], dtype=torch.float64)
    overlaps = box_iou(boxes, boxes).numpy()
    adds_box = np.array([suspect.kind in NEW_BOX_KINDS for suspect in suspects])  # (n,)
    hits_other = adds_box[:, None] & (overlaps >= _SAME_IOU)  # the new box of i hits suspect j
    # None becomes nan, which is not equal to nan: missing boxes have no common annotation.
    annotations = np.array([suspect.annotation for suspect in suspects], dtype=np.float64)
    has_same_annotation = annotations[:, None] == annotations
    is_same: npt.NDArray[np.bool_] = hits_other | hits_other.T | has_same_annotation
    return is_same


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
    return 0.9 * box_iou(first, second) + 0.1 * (1 - distance)
