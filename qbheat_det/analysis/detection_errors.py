# Copyright (c) qbheat_det contributors. Apache-2.0.
"""What is wrong with single detections: which kind of error, how often, and where it is worst.

The kinds are those of TIDE (arXiv:2008.08115, Sec. 2.2) with its thresholds: a detection is on a
box where their IoU is at least 0.5, and on background where it is at most 0.1 with every box.
Which detection is right is COCO's matching at IoU 0.50. TIDE weighs kinds by the AP that mending
them would bring; here they are counted, among the detections from a score upwards.
"""

import contextlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .detection_scores import open_coco, open_detections

Array = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]
Entry = Mapping[str, Any]

FOREGROUND_IOU, BACKGROUND_IOU = 0.5, 0.1
IGNORED = "ignored"
KINDS = {
    "right": "on a box of its class that no higher score is on",
    "localisation": "IoU 0.1 to 0.5 with a box of its class",
    "class": "on a box of another class",
    "duplicate": "on a box of its class that a higher score is on",
    "background": "IoU of 0.1 at most with every box",
    "class and localisation": "IoU 0.1 to 0.5 with a box of another class",
}
"""Kinds of detections, and what each means; earlier errors go before later ones."""
MISSED = "missed"
MISSED_MEANING = "boxes that no detection is on, nor one with an error of localisation or class"
_MAX_DETECTIONS = 100


@dataclass(frozen=True)
class Truth:
    """B boxes of ground truth that are no crowds.

    Attributes:
        image_ids: (B,).
        classes: (B,), contiguous, in the order of the categories' ids.
        boxes: (B, 4), XYXY, pixels.
        match: (B,), the detection that is right on the box; -1 if none is, whatever its score.
    """

    image_ids: Indices
    classes: Indices
    boxes: Array
    match: Indices


@dataclass(frozen=True)
class Judged:
    """D detections, and what each of them is.

    Attributes:
        image_ids: (D,).
        classes: (D,), contiguous.
        scores: (D,).
        boxes: (D, 4), XYXY, pixels.
        kinds: (D,), of ``KINDS``; ``IGNORED`` on crowds of its class, which COCO does not count,
            and beyond the 100 highest scores of an image and class.
        nearest: (D,), the box that the kind speaks of, into ``truth``: the one that it is right
            on, or taken for; of background the nearest of all. -1 in images without boxes.
        ious: (D,), with that box.
        highest_ious: (D,), with any box; 0 in images without boxes.
        truth: the boxes.
    """

    image_ids: Indices
    classes: Indices
    scores: Array
    boxes: Array
    kinds: npt.NDArray[np.str_]
    nearest: Indices
    ious: Array
    highest_ious: Array
    truth: Truth


def judge_detections(ground_truth: Entry, detections: Sequence[Entry]) -> Judged:
    """Matches detections with ground truth and finds out what is wrong with each.

    A detection's kind depends only on itself and on higher scores: those from any score upwards
    are what they would be if there were no others. Of equal scores the earlier goes first.

    Args:
        ground_truth: content of an annotation file; not changed.
        detections: COCO's results: "image_id", "category_id", "bbox" (XYWH, pixels), "score".
    """
    import pycocotools.coco

    coco = open_coco(pycocotools.coco, ground_truth)
    place = {category: k for k, category in enumerate(sorted(coco.getCatIds()))}
    match, ignored = _match(coco, open_detections(coco, pycocotools.coco, detections))
    plain = [entry for entry in coco.dataset["annotations"] if not entry["iscrowd"]]
    row = {entry["id"]: b for b, entry in enumerate(plain)}  # crowds have none
    match = np.array([row.get(int(identity), -1) for identity in match], dtype=np.int64)
    matched_by = np.full(len(plain), -1, dtype=np.int64)
    matched_by[match[match >= 0]] = np.flatnonzero(match >= 0)
    truth = Truth(
        image_ids=np.array([entry["image_id"] for entry in plain], dtype=np.int64),
        classes=np.array([place[entry["category_id"]] for entry in plain], dtype=np.int64),
        boxes=_to_xyxy([entry["bbox"] for entry in plain]),
        match=matched_by,
    )
    image_ids = np.array([found["image_id"] for found in detections], dtype=np.int64)
    classes = np.array([place[found["category_id"]] for found in detections], dtype=np.int64)
    boxes = _to_xyxy([found["bbox"] for found in detections])
    kinds, nearest, ious, highest_ious = _tell_kinds(image_ids, classes, boxes, match, truth)
    kinds[ignored] = IGNORED
    scores = np.array([found["score"] for found in detections], dtype=np.float64)
    return Judged(image_ids, classes, scores, boxes, kinds, nearest, ious, highest_ious, truth)


def choose_threshold(judged: Judged, *, otherwise: float = 0.5) -> float:
    """Returns the score from which upwards the F1 of all detections of all classes is highest.

    F1 is 2 · right / (detections + boxes), at IoU 0.50. Of equal ones the highest score is taken.
    Where no detection is right, see ``is_lost``, it is the score from which upwards there are as
    many detections as boxes: what is wrong with the detector shows in those that it is surest of.

    Args:
        judged: of a set.
        otherwise: where there is no detection.
    """
    counted = judged.kinds != IGNORED
    scores, right = judged.scores[counted], judged.kinds[counted] == "right"
    if not len(scores):
        return otherwise
    order = np.argsort(-scores, kind="stable")
    scores, right = scores[order], right[order]
    if not right.any():
        return float(scores[min(max(1, len(judged.truth.boxes)), len(scores)) - 1])
    f1 = 2 * np.cumsum(right) / (np.arange(1, len(scores) + 1) + len(judged.truth.boxes))
    f1[:-1][scores[:-1] == scores[1:]] = 0  # equal scores are all in or all out
    return float(scores[np.argmax(f1)])


def is_lost(judged: Judged) -> bool:
    """Whether there are detections, and none of them is right, whatever its score."""
    return bool((judged.kinds != IGNORED).any() and not (judged.kinds == "right").any())


def count_errors(judged: Judged, threshold: float) -> dict[str, int]:
    """Returns how many detections are of each of ``KINDS``, and how many boxes are ``MISSED``.

    Args:
        judged: of a set.
        threshold: lowest score that counts.
    """
    kept = judged.scores >= threshold
    counts = {kind: int((kept & (judged.kinds == kind)).sum()) for kind in KINDS}
    almost = kept & np.isin(judged.kinds, ["localisation", "class"])
    covered = np.zeros(len(judged.truth.boxes), dtype=np.bool_)
    covered[judged.nearest[almost]] = True
    return {**counts, MISSED: int((~(covered | _find_detected(judged, threshold))).sum())}


def find_worst_misses(
    judged: Judged, threshold: float, image_areas: Mapping[int, float]
) -> Indices:
    """Returns the boxes that nothing is right on, those first that fill most of their image.

    Args:
        judged: of a set.
        threshold: lowest score that counts.
        image_areas: pixels of each image, by its id.
    """
    truth = judged.truth
    missed = np.flatnonzero(~_find_detected(judged, threshold))
    areas = np.prod(truth.boxes[missed, 2:] - truth.boxes[missed, :2], axis=1)
    shares = areas / np.array([image_areas[int(i)] for i in truth.image_ids[missed]])
    return missed[np.argsort(-shares, kind="stable")]


def find_false_alarms(judged: Judged, threshold: float) -> Indices:
    """Returns the detections that are on no box of any class, the highest scores first.

    Duplicates and errors of class alone are none: there is a box.
    """
    # Not by kind: an error of localisation may be on a box of another class.
    free = (judged.kinds != IGNORED) & (judged.highest_ious < FOREGROUND_IOU)
    found = np.flatnonzero(free & (judged.scores >= threshold))
    return found[np.argsort(-judged.scores[found], kind="stable")]


def find_best_on(judged: Judged, box: int) -> tuple[int, float] | None:
    """Returns the highest-scoring detection on a box, of whatever class, and their IoU."""
    own = np.flatnonzero(judged.image_ids == judged.truth.image_ids[box])
    ious = measure_ious(judged.boxes[own], judged.truth.boxes[[box]])[:, 0]
    on = np.flatnonzero(ious >= FOREGROUND_IOU)
    if not len(on):
        return None
    best = on[np.argmax(judged.scores[own[on]])]
    return int(own[best]), float(ious[best])


def measure_ious(one: Array, other: Array) -> Array:
    """From boxes (n, 4) and (m, 4), XYXY, to their IoU (n, m), as COCO's library has it."""
    from pycocotools import mask

    if not len(one) or not len(other):
        return np.zeros((len(one), len(other)))
    sides = [
        np.concatenate([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], 1) for boxes in (one, other)
    ]
    return np.asarray(mask.iou(*map(np.ascontiguousarray, sides), [0] * len(other)))


def _find_detected(judged: Judged, threshold: float) -> npt.NDArray[np.bool_]:
    match = judged.truth.match
    detected = match >= 0
    detected[detected] = judged.scores[match[detected]] >= threshold
    return detected


def _match(coco: Any, found: Any) -> tuple[Indices, npt.NDArray[np.bool_]]:
    """Returns (D,) the id of the box that a detection is right on, 0 if none, and (D,) ignored."""
    from pycocotools.cocoeval import COCOeval

    evaluator = COCOeval(coco, found, "bbox")
    evaluator.params.iouThrs = np.array([FOREGROUND_IOU])
    evaluator.params.areaRng, evaluator.params.areaRngLbl = [[0, 1e10]], ["all"]
    evaluator.params.maxDets = [_MAX_DETECTIONS]
    with contextlib.redirect_stdout(io.StringIO()):
        evaluator.evaluate()
    number = len(found.dataset["annotations"])
    match, ignored = np.zeros(number, dtype=np.int64), np.ones(number, dtype=np.bool_)
    for one in evaluator.evalImgs:  # of a class and an image; None where there is nothing
        if one is not None and one["dtIds"]:
            rows = np.array(one["dtIds"]) - 1
            match[rows], ignored[rows] = one["dtMatches"][0], one["dtIgnore"][0]
    return match, ignored


def _tell_kinds(
    image_ids: Indices, classes: Indices, boxes: Array, match: Indices, truth: Truth
) -> tuple[npt.NDArray[np.str_], Indices, Array, Array]:
    """Returns what ``Judged`` has as ``kinds``, ``nearest``, ``ious`` and ``highest_ious``."""
    kinds = np.full(len(boxes), "background", dtype="U24")
    nearest, ious = np.full(len(boxes), -1, dtype=np.int64), np.zeros(len(boxes))
    highest = np.zeros(len(boxes))
    rows_of_image = _group(truth.image_ids)
    for image, detections in _group(image_ids).items():
        rows = rows_of_image.get(image)
        if rows is None:
            continue
        overlap = measure_ious(boxes[detections], truth.boxes[rows])
        same = classes[detections][:, None] == truth.classes[rows]
        own, other = np.where(same, overlap, -1.0), np.where(same, -1.0, overlap)
        highest_own, highest_other = own.max(1), other.max(1)
        is_right = match[detections] >= 0
        near_own = (highest_own >= BACKGROUND_IOU) & (highest_own < FOREGROUND_IOU)
        on_own, on_other = highest_own >= FOREGROUND_IOU, highest_other >= FOREGROUND_IOU
        highest[detections] = overlap.max(1)
        nothing = overlap.max(1) <= BACKGROUND_IOU
        order = [is_right, near_own, on_other, on_own, nothing]
        kinds[detections] = np.select(order, list(KINDS)[:5], "class and localisation")
        best_own, best_other, best = own.argmax(1), other.argmax(1), overlap.argmax(1)
        chosen = np.select(order, [best_own, best_own, best_other, best_own, best], best_other)
        nearest[detections] = np.where(is_right, match[detections], rows[chosen])
        place = np.searchsorted(rows, nearest[detections])
        ious[detections] = overlap[np.arange(len(detections)), place]
    return kinds, nearest, ious, highest


def _group(image_ids: Indices) -> dict[int, Indices]:
    """From the image of each entry to the entries of each image, in order."""
    order = np.argsort(image_ids, kind="stable")
    images, starts = np.unique(image_ids[order], return_index=True)
    ends = np.append(starts, len(order))[1:]
    return {int(i): order[a:b] for i, a, b in zip(images, starts, ends, strict=True)}


def _to_xyxy(boxes: Sequence[Sequence[float]]) -> Array:
    corners = np.array(boxes, dtype=np.float64).reshape(-1, 4)
    corners[:, 2:] += corners[:, :2]
    return corners
