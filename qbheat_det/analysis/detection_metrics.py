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
    """D detections, B ground-truth boxes without crowds, and their matches.

    COCO ignores a detection that overlaps a crowd of its class. It also ignores a detection that is
    not among the 100 highest scores of its image and class (more than 100 if an image has more
    objects). Ignored detections are neither correct nor wrong.
    """

    detections: Boxes
    scores: Array  # (D,)
    correct: npt.NDArray[np.bool_]  # (D,)
    wrong: npt.NDArray[np.bool_]  # (D,)
    ground_truth: Boxes
    matches: Indices  # (B,), for each box the index of its correct detection (any score), or -1


def evaluate_boxes(ground_truth: Entry, detections: Sequence[Entry]) -> Any:
    """Matches detections with ground truth in COCO format ("iscrowd" and "area" are optional).

    Returns an accumulated ``COCOeval``. Annotations and detections are renumbered from 1, because
    pycocotools uses id 0 for "unmatched".
    """
    with contextlib.redirect_stdout(io.StringIO()):
        coco = _index(ground_truth)
        if detections:
            results = coco.loadRes([dict(entry) for entry in detections])
        else:  # loadRes fails without entries
            results = _index({**coco.dataset, "annotations": []})
        evaluator = FastMatching(coco, results, "bbox")
        num_objects = count_most_objects(coco.anns.values())
        evaluator.params.maxDets[-1] = choose_max_detections(num_objects)
        evaluator.evaluate()
        evaluator.accumulate()
    return evaluator


def _index(content: Entry) -> COCO:
    """Returns pycocotools' index of annotations in COCO format. Changes only copies of them."""
    coco = COCO()
    annotations = [dict(entry) for entry in content["annotations"]]
    coco.dataset = {**content, "annotations": annotations}
    complete_annotations(coco.dataset)
    coco.createIndex()
    return coco


def score_detections(evaluator: Any) -> DetectionScores:
    """Computes metrics from ``evaluate_boxes``'s result. Classes without detections have AP 0."""
    # (T, R, K, A, M): IoU thresholds, recalls, classes, area ranges (the first is "all"), and
    # maximum numbers of detections (the last is that of AP).
    precision = np.array(evaluator.eval["precision"], dtype=np.float64)[..., -1]
    precision[precision < 0] = np.nan  # -1 in COCO means that a class has no boxes
    averaged = {  # the precisions whose mean is the metric
        "AP": precision[..., 0],
        "AP50": precision[0, ..., 0],
        "AP75": precision[5, ..., 0],
        "APs": precision[..., 1],
        "APm": precision[..., 2],
        "APl": precision[..., 3],
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", category=RuntimeWarning)  # the mean of only nan is nan
        summary = {key: float(100 * np.nanmean(values)) for key, values in averaged.items()}
        class_ap = 100 * np.nanmean(precision[..., 0], axis=(0, 1))
    counts = Counter(
        entry["category_id"] for entry in evaluator.cocoGt.anns.values() if not entry["iscrowd"]
    )
    num_boxes = np.array([counts[category] for category in evaluator.params.catIds], np.int64)
    return DetectionScores(summary, class_ap, num_boxes)


def find_errors(evaluator: Any) -> DetectionErrors:
    """Finds correct and wrong detections in the result of ``evaluate_boxes``.

    Whether a detection is correct depends only on detections with higher scores, and thus not on a
    score threshold. Among equal scores, earlier detections are matched first.
    """
    annotations = [entry for entry in evaluator.cocoGt.anns.values() if not entry["iscrowd"]]
    results = list(evaluator.cocoDt.anns.values())
    # COCO's match of each detection at IoU 0.50: the id of the box, or 0 if unmatched.
    matched_ids = np.zeros(len(results), dtype=np.int64)
    ignored = np.ones(len(results), dtype=np.bool_)
    all_areas = evaluator.params.areaRng[0]
    # COCO has one entry per class, area range and image, which is None without boxes.
    for entry in evaluator.evalImgs:
        if entry is not None and entry["aRng"] == all_areas and entry["dtIds"]:
            indices = np.array(entry["dtIds"]) - 1
            matched_ids[indices] = entry["dtMatches"][0]
            ignored[indices] = entry["dtIgnore"][0]
    index_of = {annotation["id"]: index for index, annotation in enumerate(annotations)}
    # For each detection, the index of its box, or -1 if it has none or its box is a crowd.
    boxes = np.array([index_of.get(int(box_id), -1) for box_id in matched_ids], dtype=np.int64)
    correct = boxes >= 0
    matches = np.full(len(annotations), -1, dtype=np.int64)
    matches[boxes[correct]] = np.flatnonzero(correct)
    return DetectionErrors(
        detections=_read_boxes(results, evaluator.params.catIds),
        scores=np.array([result["score"] for result in results], dtype=np.float64),
        correct=correct,
        wrong=~(correct | ignored),
        ground_truth=_read_boxes(annotations, evaluator.params.catIds),
        matches=matches,
    )


def _read_boxes(entries: Sequence[Entry], category_ids: Sequence[int]) -> Boxes:
    """Reads annotations or results in COCO format."""
    xyxy = np.array([entry["bbox"] for entry in entries], dtype=np.float64).reshape(-1, 4)
    xyxy[:, 2:] += xyxy[:, :2]
    class_of = {category: index for index, category in enumerate(sorted(category_ids))}
    return Boxes(
        image_ids=np.array([entry["image_id"] for entry in entries], dtype=np.int64),
        classes=np.array([class_of[entry["category_id"]] for entry in entries], dtype=np.int64),
        xyxy=xyxy,
    )


def choose_threshold(errors: DetectionErrors) -> float:
    """Returns the score threshold that maximizes F1 over all classes at IoU 0.50.

    Returns the highest score if no detection is correct, and 0.5 if there are no detections.
    """
    counted = np.flatnonzero(errors.correct | errors.wrong)
    if not len(counted):
        return 0.5
    descending = counted[np.argsort(-errors.scores[counted], kind="stable")]
    scores = errors.scores[descending]
    # With the n highest scores: F1 = 2 * (correct detections) / (n + number of boxes).
    num_correct = np.cumsum(errors.correct[descending])
    num_detections = np.arange(1, len(scores) + 1)
    f1 = 2 * num_correct / (num_detections + len(errors.matches))
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
    boxes = errors.ground_truth.xyxy[missed]
    areas = (boxes[:, 2:] - boxes[:, :2]).prod(axis=1)
    return missed[np.argsort(-areas, kind="stable")]


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
    detections = errors.detections
    ground_truth = errors.ground_truth
    background = num_classes
    counts = np.zeros((num_classes + 1, num_classes + 1), dtype=np.int64)
    missed = find_missed_boxes(errors, threshold)
    correct_classes = np.delete(ground_truth.classes, missed)
    np.fill_diagonal(counts[:-1, :-1], np.bincount(correct_classes, minlength=num_classes))
    detected_classes = np.full(len(ground_truth.classes), background)  # of the missed boxes
    for index in find_wrong(errors, threshold):
        in_image = ground_truth.image_ids[missed] == detections.image_ids[index]
        is_unmatched = detected_classes[missed] == background
        candidates = missed[in_image & is_unmatched]
        detection = torch.from_numpy(detections.xyxy[index][None])
        boxes = torch.from_numpy(ground_truth.xyxy[candidates])
        overlaps = box_iou(detection, boxes)[0].numpy()
        if overlaps.max(initial=0) >= _MATCH_IOU:
            best = candidates[overlaps.argmax()]
            detected_classes[best] = detections.classes[index]
        else:
            counts[background, detections.classes[index]] += 1
    np.add.at(counts, (ground_truth.classes[missed], detected_classes[missed]), 1)
    return counts


def count_errors_by_image(errors: DetectionErrors, threshold: float) -> Counter[int]:
    """Returns the number of wrong detections and missed boxes at ``threshold``, by image id."""
    wrong = errors.detections.image_ids[find_wrong(errors, threshold)]
    missed = errors.ground_truth.image_ids[find_missed_boxes(errors, threshold)]
    return Counter(np.concatenate([wrong, missed]).tolist())
