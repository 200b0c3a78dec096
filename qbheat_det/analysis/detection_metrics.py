# Copyright (c) qbheat_det contributors. Apache-2.0.
"""COCO metrics, and correct, wrong and missed boxes at IoU 0.50."""

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
from torchvision.ops import box_iou

from qbheat_det.evaluation import (
    FastMatching,
    choose_max_detections,
    complete_annotations,
    count_most_objects,
)

Array = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]
Entry = Mapping[str, Any]

_MATCH_IOU = 0.5


@dataclass(frozen=True)
class DetectionScores:
    """COCO metrics. Values are nan for classes or sizes without ground truth.

    ``summary`` has "AP", "AP50", "AP75", "APs", "APm" and "APl" in percent. ``class_ap`` (K,) is
    the AP of each class, and ``num_boxes`` (K,) its number of boxes without crowds.
    """

    summary: dict[str, float]
    class_ap: Array
    num_boxes: Indices


@dataclass(frozen=True)
class Boxes:
    """B boxes of a dataset: image ids (B,), contiguous classes (B,), and XYXY in pixels (B, 4)."""

    image_ids: Indices
    classes: Indices
    xyxy: Array


@dataclass(frozen=True)
class DetectionErrors:
    """D detections (``found``), B ground-truth boxes without crowds (``truth``), and their matches.

    COCO ignores a detection that overlaps a crowd of its class, or is not among the 100 highest
    scores of its image and class (more if an image has more objects). For such a detection,
    ``correct`` and ``wrong`` (D,) are False.
    ``matches`` (B,) has, for each box, the index of its correct detection (with any score), or -1.
    """

    found: Boxes
    scores: Array
    correct: npt.NDArray[np.bool_]
    wrong: npt.NDArray[np.bool_]
    truth: Boxes
    matches: Indices


def evaluate_boxes(ground_truth: Entry, detections: Sequence[Entry]) -> Any:
    """Matches detections with ground truth in COCO format ("iscrowd" and "area" are optional).

    Returns an accumulated ``COCOeval``. Annotations and detections are renumbered from 1, because
    pycocotools uses id 0 for "unmatched".
    """
    with contextlib.redirect_stdout(io.StringIO()):
        coco = _index(ground_truth)
        if detections:  # loadRes fails without entries
            found = coco.loadRes([dict(entry) for entry in detections])
        else:
            found = _index({**coco.dataset, "annotations": []})
        evaluator = FastMatching(coco, found, "bbox")
        evaluator.params.maxDets[-1] = choose_max_detections(count_most_objects(coco.anns.values()))
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
    """Computes metrics from ``evaluate_boxes``'s result. Classes without detections have AP 0."""
    # (T, R, K, A, M): IoU thresholds, recalls, classes, area ranges (the first is "all"), and
    # maximum numbers of detections (the last is that of AP).
    precision = np.array(evaluator.eval["precision"], dtype=np.float64)[..., -1]
    precision[precision < 0] = np.nan  # -1 in COCO means that a class has no boxes
    classes = [entry["category_id"] for entry in evaluator.cocoGt.anns.values()
               if not entry["iscrowd"]]  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", category=RuntimeWarning)  # the mean of only nan is nan
        parts = {"AP": precision[..., 0], "AP50": precision[0, ..., 0],
                 "AP75": precision[5, ..., 0]}  # fmt: skip
        parts |= {key: precision[..., area] for area, key in enumerate(("APs", "APm", "APl"), 1)}
        return DetectionScores(
            summary={key: float(100 * np.nanmean(part)) for key, part in parts.items()},
            class_ap=100 * np.nanmean(precision[..., 0], axis=(0, 1)),
            num_boxes=np.array([classes.count(k) for k in evaluator.params.catIds], np.int64),
        )


def find_errors(evaluator: Any) -> DetectionErrors:
    """Finds correct and wrong detections in the result of ``evaluate_boxes``.

    Whether a detection is correct depends only on detections with higher scores, and thus not on a
    score threshold. Among equal scores, earlier detections are matched first.
    """
    annotations = [entry for entry in evaluator.cocoGt.anns.values() if not entry["iscrowd"]]
    detections = list(evaluator.cocoDt.anns.values())
    found, truth = (_read_boxes(e, evaluator.params.catIds) for e in (detections, annotations))
    # COCO's match of each detection at IoU 0.50: the id of the box, or 0 if unmatched.
    ids = np.zeros(len(detections), dtype=np.int64)
    ignored = np.ones(len(detections), dtype=np.bool_)
    all_areas = evaluator.params.areaRng[0]
    for one in evaluator.evalImgs:  # one entry per class, area range and image; None if empty
        if one is not None and one["aRng"] == all_areas and one["dtIds"]:
            rows = np.array(one["dtIds"]) - 1
            ids[rows], ignored[rows] = one["dtMatches"][0], one["dtIgnore"][0]
    row = {entry["id"]: b for b, entry in enumerate(annotations)}  # without crowds
    matched = np.array([row.get(int(identity), -1) for identity in ids], dtype=np.int64)
    correct = matched >= 0
    matches = np.full(len(annotations), -1, dtype=np.int64)
    matches[matched[correct]] = np.flatnonzero(correct)
    scores = np.array([entry["score"] for entry in detections], dtype=np.float64)
    return DetectionErrors(found, scores, correct, ~(correct | ignored), truth, matches)


def _read_boxes(entries: Sequence[Entry], category_ids: Sequence[int]) -> Boxes:
    """Reads annotations or results in COCO format."""
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

    Returns the highest score if no detection is correct, and 0.5 if there are no detections.
    """
    counted = errors.correct | errors.wrong
    scores, correct = errors.scores[counted], errors.correct[counted]
    if not len(scores):
        return 0.5
    order = np.argsort(-scores, kind="stable")
    scores, correct = scores[order], correct[order]
    f1 = 2 * np.cumsum(correct) / (np.arange(1, len(scores) + 1) + len(errors.matches))
    f1[:-1][scores[:-1] == scores[1:]] = 0  # a threshold cannot separate equal scores
    return float(scores[np.argmax(f1)])


def count_errors(errors: DetectionErrors, threshold: float) -> dict[str, int]:
    """Counts "correct" and "wrong" detections scored at least ``threshold``, and "missed" boxes.

    A missed box is a ground-truth box without a correct detection scored at least ``threshold``.
    """
    kept = errors.scores >= threshold
    return {
        "correct": int(errors.correct[kept].sum()),
        "wrong": int(errors.wrong[kept].sum()),
        "missed": len(find_missed_boxes(errors, threshold)),
    }


def find_missed_boxes(errors: DetectionErrors, threshold: float) -> Indices:
    """Returns the indices of missed boxes (see ``count_errors``), largest boxes first."""
    detected = errors.matches >= 0
    detected[detected] = errors.scores[errors.matches[detected]] >= threshold
    missed = np.flatnonzero(~detected)
    sides = errors.truth.xyxy[missed, 2:] - errors.truth.xyxy[missed, :2]
    return missed[np.argsort(-sides.prod(axis=1), kind="stable")]


def find_wrong(errors: DetectionErrors, threshold: float) -> Indices:
    """Returns the indices of wrong detections scored at least ``threshold``, highest first."""
    wrong = np.flatnonzero(errors.wrong & (errors.scores >= threshold))
    return wrong[np.argsort(-errors.scores[wrong], kind="stable")]


def count_confusions(errors: DetectionErrors, threshold: float, num_classes: int) -> Indices:
    """Returns the confusion matrix (K + 1, K + 1) of true (rows) and detected (columns) classes.

    The last class is background. Only detections with scores of at least ``threshold`` are counted.
    Detections that match no box of their class are assigned, highest score first, to the unmatched
    ground-truth box of their image with the highest IoU, if this IoU is at least 0.5. Otherwise
    they count as background.
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
    """Returns the number of wrong detections and missed boxes at ``threshold``, by image id."""
    wrong = errors.found.image_ids[find_wrong(errors, threshold)]
    missed = errors.truth.image_ids[find_missed_boxes(errors, threshold)]
    return Counter(np.concatenate([wrong, missed]).tolist())
