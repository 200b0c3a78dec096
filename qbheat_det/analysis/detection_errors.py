# Copyright (c) qbheat_det contributors. Apache-2.0.
"""Types of detection errors after TIDE (Bolya et al., arXiv:2008.08115, Sec. 2.2).

COCO's matching at IoU 0.50 decides which detection is correct. TIDE weighs an error type by the
AP that fixing it would gain; here errors are counted, among the detections above a score.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from pycocotools import mask

Array = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]

FOREGROUND_IOU, BACKGROUND_IOU = 0.5, 0.1
IGNORED = "ignored"
ERROR_TYPES = {
    "correct": "matches a box of its class",
    "localization": "IoU 0.1 to 0.5 with a box of its class",
    "classification": "covers a box of another class",
    "duplicate": "covers a box of its class that a higher score matches",
    "background": "IoU of at most 0.1 with every box",
    "both": "IoU 0.1 to 0.5 with a box of another class",
}
"""Types of detections and what they mean; where several apply, the first counts."""
MISSED = "missed"
MISSED_MEANING = "boxes without a correct detection or an error of localization or classification"


@dataclass(frozen=True)
class Boxes:
    """B boxes of one dataset.

    Attributes:
        image_ids: (B,).
        classes: (B,), contiguous, in the order of the category ids.
        xyxy: (B, 4), pixels.
    """

    image_ids: Indices
    classes: Indices
    xyxy: Array

    @classmethod
    def from_coco(
        cls, entries: Sequence[Mapping[str, Any]], category_ids: Sequence[int]
    ) -> "Boxes":
        """Reads annotations or results in COCO's format."""
        xyxy = np.array([entry["bbox"] for entry in entries], dtype=np.float64).reshape(-1, 4)
        xyxy[:, 2:] += xyxy[:, :2]
        index = {category: k for k, category in enumerate(sorted(category_ids))}
        return cls(
            np.array([entry["image_id"] for entry in entries], dtype=np.int64),
            np.array([index[entry["category_id"]] for entry in entries], dtype=np.int64),
            xyxy,
        )


@dataclass(frozen=True)
class DetectionErrors:
    """D detections with their error types, and the B boxes of ground truth that are no crowds.

    Attributes:
        found: the detections.
        scores: (D,).
        types: (D,), keys of ``ERROR_TYPES``, or ``IGNORED`` for a detection that COCO does not
            count: on a crowd of its class, or beyond the 100 highest scores of image and class.
        nearest: (D,), the box that the type refers to; -1 in images without boxes.
        truth: the boxes.
        matches: (B,), the correct detection of each box, whatever its score; -1 if there is none.
    """

    found: Boxes
    scores: Array
    types: npt.NDArray[np.str_]
    nearest: Indices
    truth: Boxes
    matches: Indices


def find_errors(evaluator: Any) -> DetectionErrors:
    """Assigns each detection its error type.

    The type depends only on the detection itself and on higher scores, so it does not change when
    lower scores are left out. Of equal scores the earlier detection comes first.

    Args:
        evaluator: of ``evaluate_boxes``.
    """
    annotations = [entry for entry in evaluator.cocoGt.anns.values() if not entry["iscrowd"]]
    detections = list(evaluator.cocoDt.anns.values())
    found = Boxes.from_coco(detections, evaluator.params.catIds)
    truth = Boxes.from_coco(annotations, evaluator.params.catIds)
    # What COCO matched at IoU 0.50: the id of the box, 0 for none.
    ids = np.zeros(len(detections), dtype=np.int64)
    ignored = np.ones(len(detections), dtype=np.bool_)
    all_areas = evaluator.params.areaRng[0]
    for one in evaluator.evalImgs:  # of a class and an image; None where there is nothing
        if one is not None and one["aRng"] == all_areas and one["dtIds"]:
            rows = np.array(one["dtIds"]) - 1
            ids[rows], ignored[rows] = one["dtMatches"][0], one["dtIgnore"][0]
    row = {entry["id"]: b for b, entry in enumerate(annotations)}  # crowds have none
    matched = np.array([row.get(int(identity), -1) for identity in ids], dtype=np.int64)
    types, nearest = _assign_types(found, truth, matched)
    types[ignored] = IGNORED
    matches = np.full(len(annotations), -1, dtype=np.int64)
    matches[matched[matched >= 0]] = np.flatnonzero(matched >= 0)
    scores = np.array([entry["score"] for entry in detections], dtype=np.float64)
    return DetectionErrors(found, scores, types, nearest, truth, matches)


def choose_threshold(errors: DetectionErrors) -> float:
    """Returns the score threshold with the highest F1 over all classes, at IoU 0.50.

    Of equal F1 the highest threshold is taken. If no detection is correct, it is the threshold
    that keeps as many detections as there are boxes; 0.5 without detections.
    """
    counted = errors.types != IGNORED
    scores, correct = errors.scores[counted], errors.types[counted] == "correct"
    num_boxes = len(errors.matches)
    if not len(scores):
        return 0.5
    order = np.argsort(-scores, kind="stable")
    scores, correct = scores[order], correct[order]
    if not correct.any():
        return float(scores[min(max(1, num_boxes), len(scores)) - 1])
    f1 = 2 * np.cumsum(correct) / (np.arange(1, len(scores) + 1) + num_boxes)
    f1[:-1][scores[:-1] == scores[1:]] = 0  # equal scores are all kept or all dropped
    return float(scores[np.argmax(f1)])


def count_errors(errors: DetectionErrors, threshold: float) -> dict[str, int]:
    """Counts the detections of each type with at least that score, and the ``MISSED`` boxes."""
    kept = errors.scores >= threshold
    counts = {name: int((kept & (errors.types == name)).sum()) for name in ERROR_TYPES}
    near = kept & np.isin(errors.types, ["localization", "classification"])
    missed = ~_is_detected(errors, threshold)
    missed[errors.nearest[near]] = False
    return {**counts, MISSED: int(missed.sum())}


def find_missed_boxes(errors: DetectionErrors, threshold: float) -> Indices:
    """Returns the boxes without a correct detection of at least that score, the largest first."""
    missed = np.flatnonzero(~_is_detected(errors, threshold))
    sides = errors.truth.xyxy[missed, 2:] - errors.truth.xyxy[missed, :2]
    return missed[np.argsort(-sides.prod(axis=1), kind="stable")]


def find_false_alarms(errors: DetectionErrors, threshold: float) -> Indices:
    """Returns the detections of type "background" of at least that score, the highest first."""
    alarms = np.flatnonzero((errors.types == "background") & (errors.scores >= threshold))
    return alarms[np.argsort(-errors.scores[alarms], kind="stable")]


def _is_detected(errors: DetectionErrors, threshold: float) -> npt.NDArray[np.bool_]:
    detected = errors.matches >= 0
    detected[detected] = errors.scores[errors.matches[detected]] >= threshold
    return detected


def _assign_types(
    found: Boxes, truth: Boxes, matched: Indices
) -> tuple[npt.NDArray[np.str_], Indices]:
    """Returns ``types`` and ``nearest`` of ``DetectionErrors``."""
    types = np.full(len(matched), "background", dtype="U16")
    nearest = np.full(len(matched), -1, dtype=np.int64)
    for image in np.unique(found.image_ids):
        rows = np.flatnonzero(truth.image_ids == image)
        own = np.flatnonzero(found.image_ids == image)
        if not len(rows):
            continue
        xywh = [np.hstack([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]])
                for boxes in (found.xyxy[own], truth.xyxy[rows])]  # fmt: skip
        overlap = np.asarray(mask.iou(*xywh, [0] * len(rows)))
        same = found.classes[own][:, None] == truth.classes[rows]
        same_class, other_class = np.where(same, overlap, -1.0), np.where(same, -1.0, overlap)
        is_correct = matched[own] >= 0
        best_same, best_other, best = same_class.max(1), other_class.max(1), overlap.max(1)
        conditions = [
            is_correct,
            (best_same >= BACKGROUND_IOU) & (best_same < FOREGROUND_IOU),
            best_other >= FOREGROUND_IOU,
            best_same >= FOREGROUND_IOU,
            best <= BACKGROUND_IOU,
        ]
        types[own] = np.select(conditions, list(ERROR_TYPES)[:5], "both")
        to_same, to_other, to_any = (v.argmax(1) for v in (same_class, other_class, overlap))
        chosen = np.select(conditions, [to_same, to_same, to_other, to_same, to_any], to_other)
        nearest[own] = np.where(is_correct, matched[own], rows[chosen])
    return types, nearest
