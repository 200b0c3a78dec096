# Copyright (c) qbheat_det contributors. Apache-2.0.
"""COCO's metrics of detections, and correct, wrong and missed boxes at IoU 0.50."""

import contextlib
import io
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from torchvision.ops import box_iou

from qbheat_det.evaluation import complete_annotations

Array = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]
Entry = Mapping[str, Any]

CURVE_IOUS = {0.5: 0, 0.75: 5}
"""Rows in COCO's IoU thresholds (0.50 to 0.95) whose precision-recall curves are kept."""
_MATCH_IOU = 0.5


@dataclass(frozen=True)
class DetectionScores:
    """COCO's metrics; nan for classes or sizes without ground truth.

    ``summary`` has "AP", "AP50", "AP75", "APs", "APm", "APl" in percent, ``class_ap`` is (K,),
    ``num_boxes`` (K,) excludes crowds, ``precision`` (2, R) is the mean over classes at
    ``CURVE_IOUS``, for ``recall`` (R,).
    """

    summary: dict[str, float]
    class_ap: Array
    num_boxes: Indices
    recall: Array
    precision: Array


@dataclass(frozen=True)
class Boxes:
    """B boxes of one dataset: (B,) ids, (B,) contiguous classes, (B, 4) pixels, XYXY."""

    image_ids: Indices
    classes: Indices
    xyxy: Array


@dataclass(frozen=True)
class DetectionErrors:
    """D detections that are correct or not, and B ground-truth boxes without crowds.

    Neither ``correct`` nor ``wrong`` (D,) are detections that COCO ignores: on a crowd of their
    class, or beyond the 100 highest scores of an image and class. ``matches`` (B,) is the index of
    each box's correct detection with any score, or -1.
    """

    found: Boxes
    scores: Array
    correct: npt.NDArray[np.bool_]
    wrong: npt.NDArray[np.bool_]
    truth: Boxes
    matches: Indices


def evaluate_boxes(ground_truth: Entry, detections: Sequence[Entry]) -> Any:
    """Matches detections in COCO's format with ground truth; "iscrowd" and "area" are optional.

    Returns an accumulated ``COCOeval``. Ids of annotations and detections count from 1 in their
    order, because pycocotools uses id 0 for "unmatched".
    """
    with contextlib.redirect_stdout(io.StringIO()):
        coco = _index(ground_truth)
        if detections:  # loadRes reads the first entry
            found = coco.loadRes([dict(entry) for entry in detections])
        else:
            found = _index({**coco.dataset, "annotations": []})
        evaluator = COCOeval(coco, found, "bbox")
        evaluator.evaluate()
        evaluator.accumulate()
    return evaluator


def _index(content: Entry) -> COCO:
    coco = COCO()
    coco.dataset = {**content, "annotations": [dict(one) for one in content["annotations"]]}
    complete_annotations(coco.dataset)
    coco.createIndex()
    return coco


def score_detections(evaluator: Any) -> DetectionScores:
    """Reads the metrics of ``evaluate_boxes``; AP is 0 for classes without detections."""
    # (T, R, K, A, M): thresholds, recalls, classes, ranges of areas (the first is all), limits of
    # detections (the last is 100).
    precision = np.array(evaluator.eval["precision"], dtype=np.float64)[..., -1]
    precision[precision < 0] = np.nan  # COCO's mark of a class without boxes
    classes = [entry["category_id"] for entry in evaluator.cocoGt.anns.values()
               if not entry["iscrowd"]]  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", category=RuntimeWarning)  # mean of nan alone is nan
        parts = {"AP": precision[..., 0], "AP50": precision[0, ..., 0],
                 "AP75": precision[5, ..., 0]}  # fmt: skip
        parts |= {key: precision[..., area] for area, key in enumerate(("APs", "APm", "APl"), 1)}
        return DetectionScores(
            summary={key: float(100 * np.nanmean(part)) for key, part in parts.items()},
            class_ap=100 * np.nanmean(precision[..., 0], axis=(0, 1)),
            num_boxes=np.array([classes.count(k) for k in evaluator.params.catIds], np.int64),
            recall=np.asarray(evaluator.params.recThrs),
            precision=np.nanmean(precision[list(CURVE_IOUS.values()), :, :, 0], axis=2),
        )


def find_errors(evaluator: Any) -> DetectionErrors:
    """Finds correct and wrong detections of ``evaluate_boxes``.

    They depend only on the detection and on higher scores, so a threshold does not change them.
    Among equal scores, the earlier detection comes first.
    """
    annotations = [entry for entry in evaluator.cocoGt.anns.values() if not entry["iscrowd"]]
    detections = list(evaluator.cocoDt.anns.values())
    found, truth = (_read_boxes(e, evaluator.params.catIds) for e in (detections, annotations))
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
    correct = matched >= 0
    matches = np.full(len(annotations), -1, dtype=np.int64)
    matches[matched[correct]] = np.flatnonzero(correct)
    scores = np.array([entry["score"] for entry in detections], dtype=np.float64)
    return DetectionErrors(found, scores, correct, ~(correct | ignored), truth, matches)


def _read_boxes(entries: Sequence[Entry], category_ids: Sequence[int]) -> Boxes:
    """Reads annotations or results in COCO's format."""
    xyxy = np.array([entry["bbox"] for entry in entries], dtype=np.float64).reshape(-1, 4)
    xyxy[:, 2:] += xyxy[:, :2]
    index = {category: k for k, category in enumerate(sorted(category_ids))}
    return Boxes(
        np.array([entry["image_id"] for entry in entries], dtype=np.int64),
        np.array([index[entry["category_id"]] for entry in entries], dtype=np.int64),
        xyxy,
    )


def choose_threshold(errors: DetectionErrors) -> float:
    """Returns the score threshold that maximizes F1 over all classes at IoU 0.50.

    It is the highest score if no detection is correct, and 0.5 without detections.
    """
    counted = errors.correct | errors.wrong
    scores, correct = errors.scores[counted], errors.correct[counted]
    if not len(scores):
        return 0.5
    order = np.argsort(-scores, kind="stable")
    scores, correct = scores[order], correct[order]
    f1 = 2 * np.cumsum(correct) / (np.arange(1, len(scores) + 1) + len(errors.matches))
    f1[:-1][scores[:-1] == scores[1:]] = 0  # equal scores are all kept or all dropped
    return float(scores[np.argmax(f1)])


def count_errors(errors: DetectionErrors, threshold: float) -> dict[str, int]:
    """Counts the detections of at least that score that are correct and wrong, and missed boxes."""
    kept = errors.scores >= threshold
    return {
        "correct": int(errors.correct[kept].sum()),
        "wrong": int(errors.wrong[kept].sum()),
        "missed": len(find_missed_boxes(errors, threshold)),
    }


def find_missed_boxes(errors: DetectionErrors, threshold: float) -> Indices:
    """Returns the boxes without a correct detection of at least that score, the largest first."""
    detected = errors.matches >= 0
    detected[detected] = errors.scores[errors.matches[detected]] >= threshold
    missed = np.flatnonzero(~detected)
    sides = errors.truth.xyxy[missed, 2:] - errors.truth.xyxy[missed, :2]
    return missed[np.argsort(-sides.prod(axis=1), kind="stable")]


def find_wrong(errors: DetectionErrors, threshold: float) -> Indices:
    """Returns the wrong detections of at least that score, the highest first."""
    wrong = np.flatnonzero(errors.wrong & (errors.scores >= threshold))
    return wrong[np.argsort(-errors.scores[wrong], kind="stable")]


def count_confusions(errors: DetectionErrors, threshold: float, num_classes: int) -> Indices:
    """Counts boxes (K + 1, K + 1) by true and by detected class; the last of both is background.

    Detections of at least that score count. A wrong detection takes the missed box with the highest
    IoU of at least 0.5, in the order of the scores.
    """
    found, truth = errors.found, errors.truth
    counts = np.zeros((num_classes + 1, num_classes + 1), dtype=np.int64)
    missed = find_missed_boxes(errors, threshold)
    hits = np.bincount(np.delete(truth.classes, missed), minlength=num_classes)
    np.fill_diagonal(counts[:-1, :-1], hits)
    detected = np.full(len(truth.classes), num_classes)
    for index in find_wrong(errors, threshold):
        near = missed[truth.image_ids[missed] == found.image_ids[index]]
        near = near[detected[near] == num_classes]
        boxes = [torch.from_numpy(one) for one in (found.xyxy[index][None], truth.xyxy[near])]
        overlaps = box_iou(*boxes)[0].numpy()
        if overlaps.max(initial=0) >= _MATCH_IOU:
            detected[near[overlaps.argmax()]] = found.classes[index]
        else:
            counts[-1, found.classes[index]] += 1
    np.add.at(counts, (truth.classes[missed], detected[missed]), 1)
    return counts


def count_errors_by_image(errors: DetectionErrors, threshold: float) -> Counter[int]:
    """Counts wrong detections of at least that score and missed boxes by image id."""
    wrong = errors.found.image_ids[find_wrong(errors, threshold)]
    missed = errors.truth.image_ids[find_missed_boxes(errors, threshold)]
    return Counter(np.concatenate([wrong, missed]).tolist())
